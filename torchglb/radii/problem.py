"""What a radius is asked about: family, ball, delta, batch; and the constants that follow from it.

Everything that must be computed on the host is computed here, once per distinct radius S, so that
updates and evaluations never wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchglb.backend import Floats
from torchglb.checks import check_batch_shape, check_dtype, check_probability
from torchglb.domain import Ball, check_ball
from torchglb.errors import InputError
from torchglb.families import GLMFamily, check_family
from torchglb.families.compiled import CompiledFamily
from torchglb.radii.ball_mean import BallRule, ball_rule


@dataclass(frozen=True, eq=False)
class Problem:
    """A batch of confidence sequences: ``theta* in B(S)``, features of norm at most 1.

    Args:
        family: the GLM family.
        domain: the ball; its radius may differ along the batch.
        delta: the failure probability, in (0, 1).
        batch_shape: ``*B``.
        dtype: of the rows that will be seen. The carried sums are always float64: a float32
            running sum of equal terms drifts, and they are few.
        device: of the rows and of all state.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> Problem(Bernoulli(), Ball(2, 4.0), delta=0.05).S
        tensor(4., dtype=torch.float64)
    """

    family: GLMFamily
    domain: Ball
    delta: float
    batch_shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    device: torch.device | str | None = None
    _radii: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_family(self.family)
        check_ball(self.domain)
        check_probability("delta", self.delta)
        if not isinstance(self.domain.radius, Tensor):
            self.family.require_convex(self.domain.radius)
        check_dtype(self.dtype)
        object.__setattr__(self, "batch_shape", check_batch_shape(self.batch_shape))
        radii = torch.as_tensor(self.domain.radius, dtype=torch.float64, device="cpu").detach()
        check_ball(self.domain, batch_shape=self.batch_shape)
        object.__setattr__(self, "_radii", radii.expand(self.batch_shape))

    @cached_property
    def _distinct(self) -> tuple[Tensor, Tensor]:
        """The distinct radii, and where each problem's is among them, ``(*B)``."""
        distinct, place = torch.unique(self._radii, return_inverse=True)
        return distinct, place.reshape(self.batch_shape)

    @property
    def dim(self) -> int:
        """d."""
        return self.domain.dim

    @cached_property
    def log_failure(self) -> float:
        """``log(1/delta)``."""
        return -math.log(self.delta)

    @cached_property
    def max_radius(self) -> float:
        """The largest S of the batch."""
        return float(self._radii.max()) if self._radii.numel() else 1.0

    @cached_property
    def S(self) -> Tensor:
        """The radii of the balls, ``(*B)``."""
        return self.per_radius(lambda radius: radius)

    @cached_property
    def log_volume(self) -> Tensor:
        """``log vol B(S)``, ``(*B)``."""
        return self.per_radius(lambda radius: float(Ball(self.dim, radius).log_volume()))

    @cached_property
    def max_variance(self) -> Tensor:
        """R_mudot, the largest ``m''`` on [-S, S], ``(*B)``."""
        return self.per_radius(self.family.max_variance)

    @cached_property
    def bounded_slope(self) -> float | Tensor | None:
        """``2 S (b - a + 2 S R_mudot)/g`` for rewards in [a, b]: a number, or ``(*B)`` as S is.

        None for rewards without bounds.
        """
        low, high = self.family.reward_range
        if high - low == math.inf:
            return None

        def slope(radius: float) -> float:
            reach = 2.0 * radius * self.family.max_variance(radius)
            return 2.0 * radius * ((high - low + reach) / self.family.dispersion)

        distinct, _ = self._distinct  # on the host
        return slope(float(distinct[0])) if len(distinct) == 1 else self.per_radius(slope)

    @cached_property
    def self_concordance(self) -> Tensor:
        """R_s on [-S, S], ``(*B)``; raises InputError for a family that has none."""
        return self.per_radius(lambda radius: self_concordance_of(self.family, radius))

    @cached_property
    def ball_rule(self) -> BallRule:
        """The certified rules for ``E m(S |x| U)``, one for the S of every problem."""
        distinct, place = self._distinct
        with torch.device("cpu"):  # whatever the default device is
            rules = [ball_rule(self.family, self.dim, S) for S in distinct.tolist() or [1.0]]
        nodes, weights, errors = zip(*rules, strict=True)
        # shorter rules get more nodes, at 0 and of no weight
        padded = (pad_sequence(list(part), batch_first=True) for part in (nodes, weights))
        return BallRule(*(t[place].to(self.device) for t in (*padded, torch.stack(errors))))

    @cached_property
    def compiled(self) -> CompiledFamily | None:
        """The family as compiled code knows it, on a CPU; else None."""
        return self.family.compiled() if self.S.device.type == "cpu" else None

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """What compiled code needs in every round, once it has been made."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what compiled code needs: a copy makes its own."""
        return {name: value for name, value in vars(self).items() if name != "prepared"}

    def compiled_rules(self) -> Floats:
        """:attr:`ball_rule` for compiled code, ``(N, 2 nodes + 2)``.

        Nodes, weights, the error, and the largest m'' on the ball.
        """
        if "rules" not in self.prepared:
            columns = (*self.ball_rule, self.max_variance)
            parts = [t.reshape(self.S.numel(), -1).numpy() for t in columns]
            self.prepared["rules"] = np.concatenate(parts, axis=-1)
        return self.prepared["rules"]

    def at_time(self, t: int) -> Problem:
        """The same with ``delta/(t (t + 1))``, which adds up to delta over t = 1, 2, ..."""
        return replace(self, delta=self.delta / (t * (t + 1)))

    @cached_property
    def flat(self) -> Problem:
        """The same problems with one batch axis."""
        if len(self.batch_shape) == 1:
            return self
        ball = Ball(self.dim, self._radii.reshape(-1))
        number = (self._radii.numel(),)
        return Problem(self.family, ball, self.delta, number, self.dtype, self.device)

    def per_radius(self, function: Callable[[float], float]) -> Tensor:
        """``function(S)``, ``(*B)`` float64 on the device, called once per distinct S."""
        distinct, place = self._distinct
        found = [function(s) for s in distinct.tolist()]
        values = torch.tensor(found, dtype=torch.float64, device="cpu")
        return values[place].to(self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of shape ``(*B, *shape)``, float64 on the device."""
        return torch.zeros((*self.batch_shape, *shape), dtype=torch.float64, device=self.device)


def self_concordance_of(family: GLMFamily, radius: float) -> float:
    """R_s of a family on ``[-radius, radius]``: the least R with ``|m'''| <= R m''``.

    Raises:
        InputError: the family has no finite R_s there; only sets that do not linearise the
            likelihood (``Lipschitz``, ``MeanLoss``, ``Mixture``, ``Covering``) are left.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> round(self_concordance_of(Bernoulli(), 3.0), 4)
        0.9051
    """
    try:
        value = family.self_concordance(radius)
    except NotImplementedError:
        value = math.nan
    if value is None or not 0.0 <= value < math.inf:
        raise InputError(
            f"family: expected a self-concordant family (|m'''| <= R_s m'' on [-{radius:g}, "
            f"{radius:g}] with a finite R_s), got {type(family).__name__} with R_s = {value}"
        )
    return float(value)
