"""A GLM as the last layer of any network: fitted, not trained, and with intervals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchglb.array_like import ArrayLike
from torchglb.checks import (
    FLOATS,
    as_tensor,
    check_batch_shape,
    check_flag,
    check_probability,
    check_shape,
    check_tolerance,
    kind_of,
    refuse,
    renamed,
)
from torchglb.choices import BallMode, ScaleName
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.heads.embedding import Door, Observations, in_dtype_of, warn_of_training_mode
from torchglb.heads.frozen import Embedding, FrozenHead
from torchglb.heads.saving import Computed, fingerprint, unchanged_on_failure
from torchglb.heads.unit_ball import UnitBall, unit_ball
from torchglb.identity import check_belongs, describe, reading_state
from torchglb.mle import constrained_mle
from torchglb.policies.saving import taken
from torchglb.radii import Radius
from torchglb.rows.buffers import Rows
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import EllipsoidSet, Interval, LikelihoodRatioSet
from torchglb.turns import TakesTurns


class GLMHead(TakesTurns, nn.Module):
    """Puts a calibrated GLM on the features of a network.

    With features ``phi(c)`` in the unit ball, the prediction for a context c is

        ``mu(<phi(c), theta_hat>)``,  theta_hat the constrained MLE of the observations so far.

    The last layer is not trained: it is the solution of its own problem, and in training mode
    gradients pass through that solution into the network, by implicit differentiation. The raw
    contexts are kept, so the features of the past are always those of the network as it is now; a
    change of its parameters is noticed (other than one through ``.data``: then call
    :meth:`refresh`).

    Guarantees: for a representation that was fixed before the observations, and if the rewards are
    of the family with a theta* in the ball for these features, the intervals hold at all times at
    once with probability 1 - delta. For a network that was trained on the same rewards they are
    what its features suggest, without that guarantee; train it on other data. Dropout and batch
    statistics make features random, or dependent on their companions, in training mode, which is
    where a network begins: call ``eval()`` (:class:`torchglb.errors.TrainingModeWarning`).

    Args:
        module: the network, from ``(N, *E)`` to ``(N, d)``; ``*E`` are the axes of one context.
        family: the GLM family of the rewards.
        domain: the ball of theta, of dimension d.
        delta: the failure probability of the intervals.
        radius: of :class:`torchglb.ConfidenceSequence`.
        ellipsoidal: intervals from ellipsoids, which cost less, instead of likelihood-ratio sets.
        bound: how features get into the unit ball: a mode of :class:`UnitBall`, or one.
        regularization: lambda of a ridge in the fit behind ``forward``. A derivative needs a unique
            minimiser: lambda > 0, or observations that span the features.
        batch_shape: ``*B``, problems with observations of their own under one network.
        context_dims: the number of axes in ``*E``; None reads it off the first ``update`` or
            ``select`` (before, contexts are taken to be vectors).
        validate: look at the values of what comes in and of what the network returns.
        dtype: in which the GLM computes, float64 unless told; follows ``.float()`` and
            ``.double()``. The network has a dtype of its own: contexts are handed over in that of
            its parameters, and features of float32, float16, bfloat16 or autocast are widened.
        device: of the observations; follows ``.to()``.

    ``torch.func.vmap(head)`` maps over contexts in evaluation mode. ``torch.compile`` leaves out
    the fit (it is not traced, and breaks the graph); compile the network instead, or export
    :meth:`freeze`.

    Example:
        >>> import torchglb as glb
        >>> head = GLMHead(nn.Linear(5, 2), glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> head.update(torch.randn(20, 5), torch.ones(20))
        >>> head.select(torch.randn(4, 5)).shape
        torch.Size([])
    """

    in_turn = (
        "update",
        "refresh",
        "sequence",
        "forward",
        "logits",
        "freeze",
        "theta",
        "confidence",
        "on_boundary",
        "select",
        "state_dict",
        "load_state_dict",
    )

    def __init__(
        self,
        module: nn.Module,
        family: GLMFamily,
        domain: Ball,
        *,
        delta: float = 0.05,
        radius: str | Radius = "pac-bayes",
        ellipsoidal: bool = False,
        bound: BallMode | UnitBall = "smooth",
        regularization: float = 0.0,
        batch_shape: tuple[int, ...] = (),
        context_dims: int | None = None,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise refuse("module", "an nn.Module", kind_of(module))
        self.module, self.family, self.domain = module, family, domain
        self.delta, self.radius = check_probability("delta", delta), radius
        self.ellipsoidal = check_flag("ellipsoidal", ellipsoidal)
        validate = check_flag("validate", validate)
        self.regularization = check_tolerance("regularization", regularization)
        batch_shape = check_batch_shape(batch_shape)
        self.batch_shape = torch.Size(batch_shape)
        if not isinstance(domain, Ball):
            raise refuse("domain", "a Ball, such as Ball(dim, S)", repr(domain))
        self.bound = unit_ball(bound)
        self._infer = context_dims is None  # until the first update or choice
        dims = 1 if context_dims is None else context_dims
        self.observations = Observations(batch_shape, dims, None, dtype, device)
        self._door = Door(type(module).__name__, domain.dim, self.bound, validate)
        # refuses settings that do not fit
        self._kept: ConfidenceSequence | None = self._empty_sequence()
        self._theta: Tensor | None = None
        # where fits begin as long as nothing changes, so that equal questions have equal answers,
        # and the last estimate, where they begin afterwards
        self._start: Tensor | None = None
        self._next_start: Tensor | None = None
        self._stamp: list[tuple[Any, ...]] | None = self._now()
        self._saved: Computed | None = None  # of a state or a copy, until it is known to fit

    def __len__(self) -> int:
        """The number of observations so far."""
        return len(self.observations)

    # ---- features ------------------------------------------------------------------------

    def features(self, contexts: ArrayLike) -> Tensor:
        """The features ``(..., d)`` of contexts ``(..., *E)``, in the unit ball."""
        contexts = self.observations.as_contexts(contexts)
        dims = self.observations.context_dims
        if contexts.ndim < dims:
            got = f"shape {tuple(contexts.shape)}"
            raise refuse("contexts", f"a tensor of at least {dims} axes", got)
        split = contexts.ndim - dims
        lead, own = contexts.shape[:split], contexts.shape[split:]
        flat = contexts.reshape(lead.numel(), *own)
        raw = self.module(in_dtype_of(flat, self.module.parameters()))
        features = self._door.admit(raw, (lead.numel(),), self.observations.rewards, flat)
        return features.reshape(*lead, self.domain.dim)

    def _learn_axes(self, contexts: Tensor, leading: int) -> None:
        """Notes how many axes a context has, where nobody has said so."""
        if self._infer:
            dims = contexts.ndim - len(self.batch_shape) - leading
            if dims < 0:
                got = f"shape {tuple(contexts.shape)}"
                raise refuse("contexts", f"at least {len(self.batch_shape) + leading} axes", got)
            self.observations.context_dims = dims

    # ---- learning ------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self,
        contexts: ArrayLike,
        rewards: ArrayLike,
        weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> None:
        """Adds an observation, contexts ``(*B, *E)``, rewards ``(*B)``, or k, ``(*B, k, *E)``.

        They may come late and out of order, as long as the delay does not depend on the reward,
        given the context and the past (:class:`torchglb.ConfidenceSequence`).

        Args:
            contexts: what was seen.
            rewards: what came of it.
            weight: in [0, 1], fixed before the reward was seen; 1 if left out.
            mask: booleans shaped like the rewards: False where there is none, whatever stands
                there. Whether a reward is there must not depend on it.

        Raises:
            InputError: on contexts, features or rewards that do not fit; nothing is then changed.
        """
        like = self.observations.rewards
        rewards = as_tensor("rewards", rewards, dtype=like.dtype, device=like.device)
        axis, contexts = len(self.batch_shape), self.observations.as_contexts(contexts)
        self._learn_axes(contexts, rewards.ndim - axis)
        if self.observations.check(contexts):
            contexts = contexts.unsqueeze(axis)
            check_shape("rewards", rewards, self.batch_shape)
            rewards = rewards[..., None]
        check_shape("rewards", rewards, contexts.shape[: axis + 1])
        contexts, w = self.observations.weighted(contexts, rewards, weight, mask)
        present = None if w is None else w > 0
        sequence, features = self.sequence(), self.features(contexts)
        self._saved = None  # of fewer observations
        before, mark = len(self), sequence.mark()
        try:
            sequence.update(features, rewards, w, present)
            self.observations.append(contexts, rewards, w)
        except BaseException as error:
            self._theta = None
            if len(self) == before:  # what is not kept is not learnt either
                sequence.reset(mark)
            if isinstance(error, InputError):
                raise renamed(error, r="rewards") from None
            raise
        self._theta, self._infer, self._start = None, False, self._next_start

    def refresh(self) -> None:
        """Forgets everything that was computed from the network's parameters."""
        self._kept, self._theta, self._stamp, self._saved = None, None, None, None

    def sequence(self, differentiable: bool = False) -> ConfidenceSequence:
        """The confidence sequence of the observations, for the features as they are now.

        Args:
            differentiable: keep the graph from the network's parameters, if one requires grad.
        """
        if differentiable and self._learns():
            return self._embedded()
        warn_of_training_mode(self.module)
        self._notice_changes()
        if self._kept is None:
            with torch.no_grad():
                self._kept = self._embedded()
        return self._kept

    def _learns(self) -> bool:
        return any(p.requires_grad for p in self.module.parameters())

    def _embedded(self) -> ConfidenceSequence:
        sequence = self._empty_sequence()
        if len(self):
            contexts, rewards = self.observations.rows()
            w = self.observations.row_weights()
            present = None if w is None else w > 0
            sequence.update(self.features(contexts), rewards, w, present)
        return sequence

    def _empty_sequence(self) -> ConfidenceSequence:
        like = self.observations.rewards
        return ConfidenceSequence(
            self.family,
            self.domain,
            self.delta,
            self.radius,
            self.ellipsoidal,
            tuple(self.batch_shape),
            validate=self._door.validate,
            dtype=like.dtype,
            device=like.device,
        )

    def _now(self) -> list[tuple[Any, ...]]:
        """What the features depend on, as far as it can be seen."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        seen = [(t, t._version, t.dtype, t.device) for t in tensors]
        like = self.observations.rewards
        return [(self.module.training, like.dtype, like.device), *seen]

    def _is_unchanged(self) -> bool:
        """Whether the network is as it was when it was last looked at."""
        now, then = self._now(), self._stamp
        if then is None or len(now) != len(then):
            return False
        # tensors are compared by identity: the list holds on to them, so no other takes their place
        return all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, then, strict=True))

    @torch.no_grad()
    def _notice_changes(self) -> None:
        if self._is_unchanged():
            return
        if self._stamp is not None:  # else nothing may have changed, but nobody knows
            self._start = self._next_start
        self._kept, self._theta, self._stamp = None, None, self._now()
        saved = self._saved
        if saved is not None and len(self) and saved.is_of(self.module, self._embed):
            self._kept, self._theta, self._saved = saved.sequence, saved.theta, None

    def _embed(self) -> Tensor:
        return self.features(self.observations.rows()[0])

    def _computed(self) -> Computed | None:
        """What was computed so far, for a state or a copy."""
        if self._kept is None or not self._is_unchanged():
            return self._saved
        return Computed(fingerprint(self.module), self._kept, self._theta)

    def __getstate__(self) -> dict[str, Any]:
        """Tensors of a copy count their changes anew: it has to find out that none was made."""
        lost = {"_kept": None, "_theta": None, "_stamp": None}
        return vars(self) | lost | {"_saved": self._computed()}

    # ---- answers -------------------------------------------------------------------------

    def forward(self, contexts: ArrayLike) -> Tensor:
        """Mean predictions ``(*B)`` or ``(*B, K)`` for contexts ``(*B, *E)`` or ``(*B, K, *E)``.

        In training mode, with gradients enabled, differentiable through the fit of the last layer
        too; in evaluation mode theta_hat is a constant.
        """
        mean: Tensor = self.family.mean(self.logits(contexts))
        return mean

    def logits(self, contexts: ArrayLike) -> Tensor:
        """``<phi(c), theta_hat>``, of the shape of :meth:`forward` and differentiable alike."""
        contexts = self.observations.as_contexts(contexts)
        single = self.observations.check(contexts)
        theta = self.theta()
        features = self.features(contexts)
        features = features[..., None, :] if single else features
        linear = (features @ theta[..., None])[..., 0]
        return linear[..., 0] if single else linear

    @torch.no_grad()
    def freeze(self) -> FrozenHead:
        """The head as it stands now, for serving: no fit, no history, and it can be exported.

        Intervals are those of an ellipsoid around the confidence set: valid, and wider. The network
        is copied, in evaluation mode.

        Example:
            >>> import torchglb as glb
            >>> head = GLMHead(nn.Linear(5, 2), glb.Bernoulli(), glb.Ball(2, 3.0))
            >>> head.update(torch.randn(20, 5), torch.ones(20))
            >>> program = torch.export.export(head.freeze(), (torch.randn(4, 5),))
            >>> program.module()(torch.randn(4, 5)).score.shape
            torch.Size([4])
        """
        region = self.sequence().current()
        if isinstance(region, LikelihoodRatioSet):
            region = region.ellipsoid()
        assert isinstance(region, EllipsoidSet)
        network = copy.deepcopy(Embedding(self.module, self.bound, region.gamma.dtype))
        return FrozenHead(network, self.family, region).eval()

    def theta(self) -> Tensor:
        """theta_hat ``(*B, d)``; 0 before the first observation. Differentiable as ``forward``."""
        self._notice_changes()
        if self.training and torch.is_grad_enabled() and self._learns() and len(self):
            return self._fit()
        if self._theta is None:
            with torch.no_grad():
                self._theta = self._fit()
        return self._theta

    def _fit(self) -> Tensor:
        if not len(self):
            like = self.observations.rewards
            return like.new_zeros((*self.batch_shape, self.domain.dim))
        contexts, rewards = self.observations.rows()
        theta = constrained_mle(
            self.family,
            Rows(self.features(contexts), rewards, self.observations.row_weights()),
            self.domain,
            start=self._start,
            regularization=self.regularization,
            validate=False,  # features and rewards have passed their doors
        ).theta
        self._next_start = theta.detach()
        return theta

    def confidence(
        self, contexts: ArrayLike, scale: ScaleName = "mean", *, differentiable: bool = False
    ) -> Interval:
        """Intervals for contexts ``(*B, *E)`` or ``(*B, K, *E)``.

        Args:
            contexts: the questions.
            scale: ``"mean"`` for mean rewards, ``"linear"`` for ``<phi(c), theta>``.
            differentiable: with respect to the contexts and to the network's parameters, through
                the history, the MLE and the bound. For ellipsoids the observations must then span
                the features, unless all parameters are frozen.
        """
        contexts = self.observations.as_contexts(contexts)
        self.observations.check(contexts)
        with torch.set_grad_enabled(check_flag("differentiable", differentiable)):
            current = self.sequence(differentiable).current()
            return current.interval(self.features(contexts), scale=scale)

    def on_boundary(self) -> Tensor | None:
        """Whether the observations refute ``|theta*| <= S``, ``(*B)``: then intervals are wrong.

        :meth:`confidence` and :meth:`select` warn of it (:class:`torchglb.BoundaryWarning`).
        """
        return self.sequence().on_boundary()

    @torch.no_grad()
    def select(self, contexts: ArrayLike) -> Tensor:
        """The index ``(*B)`` of the context with the largest upper bound, of ``(*B, K, *E)``."""
        contexts = self.observations.as_contexts(contexts)
        self._learn_axes(contexts, 1)
        got = f"shape {tuple(contexts.shape)}"
        if self.observations.check(contexts):
            raise refuse("contexts", "shape (*B, K, *E)", got)
        if not contexts.shape[len(self.batch_shape)]:
            raise refuse("contexts", "at least one to choose from", got)
        return self.sequence().current().upper_bound(self.features(contexts)).argmax(-1)

    # ---- saving --------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """The observations, for ``state_dict``, and what was computed from them.

        A head that loads both with the same network continues bit by bit. One with another network
        embeds the observations anew.
        """
        computed = self._computed()
        return {
            "observations": self.observations.saved(),
            "computed": None if computed is None else computed.state_dict(),
            "start": None if self._start is None else self._start.clone(),
            "next_start": None if self._next_start is None else self._next_start.clone(),
            "settings": self._belongs_to(),
        }

    def _belongs_to(self) -> dict[str, Any]:
        """What the observations were collected for."""
        return {
            "family": describe(self.family),
            "S": describe(self.domain.radius),
            "delta": self.delta,
            "radius": describe(self.radius),
            "ellipsoidal": self.ellipsoidal,
            "regularization": self.regularization,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes over saved observations, and what was computed; they are checked first."""
        with reading_state("a head"):
            check_belongs("state['settings']", state.get("settings"), self._belongs_to())
            observations = self.observations.restored(state["observations"], self._infer)
            computed = state.get("computed")
            if computed is not None:
                computed = Computed.of(computed, self._empty_sequence(), len(observations))
            like = observations.rewards.new_zeros((*self.batch_shape, self.domain.dim))
            start, following = (
                None if state.get(name) is None else taken(state, name, like)
                for name in ("start", "next_start")
            )
        self.refresh()
        self._infer = self._infer and not observations.known
        self.observations, self._saved = observations, computed
        self._start, self._next_start = start, following

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's, but a state that is refused leaves weights and observations as they were."""
        with self.unchanged_within(self):
            return super().load_state_dict(state_dict, strict, assign)

    @contextmanager
    def unchanged_within(self, module: nn.Module) -> Iterator[None]:
        """Whatever goes wrong leaves a module that contains this head, and the head, as it was."""
        computed = self._computed()
        try:
            with unchanged_on_failure(module):
                yield
        except BaseException:
            self._saved, self._stamp = computed, None  # weights are the same, but were written to
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GLMHead:
        kept = self.observations
        rewards, weights, contexts = kept.rewards, kept.weights, kept.contexts
        super()._apply(fn, recurse)
        moved = self.observations.rewards
        if moved.dtype not in FLOATS:  # the network may be in half precision, the GLM is not
            self.observations.rewards = rewards.to(moved.device)
            self.observations.weights = weights.to(moved.device)
            self.observations.contexts = contexts.to(moved.device)
        self.refresh()
        self._start = self._next_start = None
        return self
