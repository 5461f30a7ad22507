"""Confidence sequences for declared contrasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import check_entries, check_flag, check_probability, refuse
from torchglb.choices import Relation, ScaleName
from torchglb.contrasts import ContrastParts, DeclaredContrasts
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.inference.tests import TestResult
from torchglb.radii import Radius
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import Interval, LikelihoodRatioSet
from torchglb.turns import TakesTurns


class ContrastSequence(TakesTurns):
    """Intervals for ``<c, theta*>`` at all times, for contrasts c named beforehand.

    A joint set pays for all d directions of theta, a contrast for one: in units of a fixed sample's
    95% interval about 2 instead of 5 or 6 at d = 20. Each interval is valid at all times at once,
    for features chosen in any way from the past:

        ``P(<c_j, theta*> in I_{j,t} for all t) >= 1 - delta``  for every j (marginal), or
        ``P(<c_j, theta*> in I_{j,t} for all t and j) >= 1 - delta``  (``simultaneous``).

    **The contrasts must be chosen before the rewards are seen.** For one that was picked because
    of its interval nothing is promised: ask for ``simultaneous`` intervals of all that might be
    picked, or use the joint set, which covers every direction.

    How: the share ``joint_share`` of delta goes to a joint set (half of that to the likelihood
    ratio with the prior of ``radius``, half to a centred prior), the rest to the martingale of
    weighted rewards (:mod:`torchglb.contrasts.lines`), whose value at theta* is bounded over the
    joint set. Both hold with probability 1 - delta, so the interval is what they have in common: it
    is never wider than that of the joint set ``joint``.

    A row costs O(d^2 + m d), a look O(n d^2) for the joint set and for each contrast; the memory of
    both is that of the rows (:mod:`torchglb.contrasts.weights`). Late rows are in order as in
    :class:`torchglb.ConfidenceSequence`: a delay must not depend on the reward.

    Args:
        family: the GLM family; its self-concordance must be declared.
        domain: the ball that contains theta*.
        contrasts: ``(m, d)`` or ``(*B, m, d)``, none of length 0; or a mapping from names to them.
        delta: the failure probability.
        joint_share: the part of delta that the joint set gets.
        batch_shape: ``*B``, problems that advance together.
        radius: of the joint set, one that keeps to the ball.
        centred: whether half of the joint set's share goes to the centred prior
            (:func:`torchglb.contrasts.enclosure.centred_budgets`).
        running: intersect with the intervals of all earlier looks.
        validate: look at the values of what comes in.

    Example:
        >>> import torchglb as glb
        >>> sequence = ContrastSequence(
        ...     glb.Gaussian(), glb.Ball(2, 3.0), {"B-A": [-1.0, 1.0]}, delta=0.05
        ... )
        >>> sequence.update([[1.0, 0.0], [0.0, 1.0]] * 200, [0.5, 2.5] * 200)
        >>> lower, upper = sequence.current()
        >>> bool((lower > 1.5) & (upper < 2.5))
        True
    """

    in_turn = ("update", "current", "estimate", "parts", "test", "state_dict", "load_state_dict")

    def __init__(
        self,
        family: GLMFamily,
        domain: Ball,
        contrasts: ArrayLike | Mapping[str, ArrayLike],
        delta: float,
        joint_share: float = 0.1,
        batch_shape: tuple[int, ...] = (),
        *,
        radius: str | Radius = "pac-bayes",
        centred: bool = True,
        running: bool = False,
        validate: bool = True,
    ) -> None:
        share = check_probability("joint_share", joint_share)
        share *= 0.5 if check_flag("centred", centred) else 1.0
        level = check_probability("delta", delta) * share
        #: the likelihood-ratio sets under it
        self.joint = ConfidenceSequence(
            family, domain, level, radius, batch_shape=batch_shape, validate=validate
        )
        if not self.joint.radius.confined:
            raise refuse("radius", "one that keeps to the ball", self.joint.radius)
        self.declared = DeclaredContrasts(
            self.joint.problem, contrasts, delta, joint_share, centred=centred, running=running
        )
        self.family, self.domain, self.delta = family, domain, delta

    @property
    def names(self) -> tuple[str, ...] | None:
        """Of the contrasts, where they were given with names."""
        return self.declared.names

    def __len__(self) -> int:
        """The number of observations so far."""
        return len(self.joint)

    def update(
        self,
        x: ArrayLike,
        r: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Adds one observation, ``x (*B, d)``, or many in their order, ``x (*B, k, d)``.

        Args:
            x: features of norm at most 1.
            r: rewards.
            weight: in [0, 1], fixed before the reward was seen; 1 if left out.
            mask: False where there is no reward; as in :class:`torchglb.ConfidenceSequence`.

        Raises:
            InputError: on any argument that does not fit; nothing is then changed.
        """
        self.joint.update(x, r, weight, mask)

    def _region(self) -> LikelihoodRatioSet:
        region = self.joint.current()
        assert isinstance(region, LikelihoodRatioSet)
        return region

    def current(self, simultaneous: bool = False, scale: ScaleName = "linear") -> Interval:
        """The intervals now, ``(*B, m)``, and with ``running`` of all looks so far.

        Args:
            simultaneous: all m at once with probability 1 - delta, instead of each by itself.
            scale: ``"linear"`` for ``<c, theta>``; ``"mean"`` for ``mu(<c, theta>)``, where every
                contrast is a feature vector of norm at most 1.
        """
        return self.declared.current(self._region(), simultaneous, scale)

    def estimate(self) -> Tensor:
        """``<c, theta_hat>`` at the constrained maximum-likelihood estimate, ``(*B, m)``."""
        center = self.joint.current().center
        return (self.declared.contrasts @ center[..., None])[..., 0]

    def parts(self) -> ContrastParts:
        """Of what the upper ends consist: for tables and pictures."""
        return self.declared.parts(self._region())

    def test(self, value: ArrayLike, relation: Relation = "==") -> TestResult:
        """E-values and p-values of ``<c_j, theta*> = value``, or ``<=``, or ``>=``; ``(*B, m)``.

        ``P(E_t >= 1/alpha for some t) <= alpha`` under the null hypothesis, for each contrast
        (:mod:`torchglb.contrasts.evidence`); for several at once, :func:`torchglb.inference.e_bh`.

        Args:
            value: a number, or ``(m)`` or ``(*B, m)``.
            relation: ``"=="``, ``"<="`` or ``">="``.

        Returns:
            ``theta``, ``(*B, m, d)``, is the point of ``<c, theta> = value`` that is nearest to the
            estimate in the metric of the joint set; NaN where that is not known.
        """
        return self.declared.test(self._region(), value, relation)

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit, as plain tensors, numbers and words."""
        return {"joint": self.joint.state_dict(), "contrasts": self.declared.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of other contrasts or settings."""
        check_entries("state", state, ("joint", "contrasts"))
        best = self.declared.checked_state(state["contrasts"])
        self.declared.forget_rows()  # of the weights, whatever comes in between
        self.joint.load_state_dict(state["joint"])
        self.declared.best = best  # no call: nothing comes in between
