"""The exponential families behind a GLM, as torch modules.

A reward ``r`` given a feature ``x`` has density ``exp((r z - m(z)) / g + h(r))`` with
``z = <x, theta>``, log-partition ``m`` and dispersion ``g``. Only ``m`` must be written; mean,
variance and higher derivatives follow by differentiation. Closed forms override the defaults.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from torchglb.array_like import ArrayLike
from torchglb.checks import ValueChecks, as_floats, check_float, check_positive, kind_of, refuse
from torchglb.errors import UndeclaredConstantWarning
from torchglb.families.compiled import CompiledFamily

Kind = TypeVar("Kind", bound="GLMFamily")


class LossTerms(NamedTuple):
    """The loss of one observation and its first two derivatives in z, each including 1/g.

    Example:
        >>> import torch
        >>> import torchglb as glb
        >>> terms = glb.Bernoulli().loss_terms(torch.tensor(0.0), torch.tensor(1.0))
        >>> terms.slope, terms.curvature
        (tensor(-0.5000), tensor(0.2500))
    """

    loss: Tensor
    slope: Tensor
    curvature: Tensor


class GLMFamily(nn.Module):
    """A one-parameter exponential family in canonical form; only ``log_partition`` is required.

    Subclasses may override the derivatives by stable closed forms and declare the constants on
    which confidence sets rest: ``dispersion`` (g), ``reward_range``, ``self_concordance`` (R_s),
    ``max_variance`` (R_mudot), ``min_variance`` (1/kappa) and ``derivative_ratio``.

    Example:
        >>> import torch
        >>> class Exponential(GLMFamily):
        ...     def log_partition(self, z):
        ...         return -torch.log(-z)
        >>> Exponential().mean(torch.tensor(-2.0).double())
        tensor(0.5000, dtype=torch.float64)
    """

    #: whether rewards are almost surely within ``reward_range`` and that range is finite
    reward_range: tuple[float, float] = (-float("inf"), float("inf"))
    #: whether rewards must be whole numbers
    integer_rewards: bool = False

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k in self.shown}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    #: attributes that ``repr`` shows
    shown: tuple[str, ...] = ("trials", "sigma", "link", "name")

    @property
    def dispersion(self) -> float:
        """The dispersion g; the variance of a reward is ``g * variance(z)``."""
        return 1.0

    # ---- the log-partition and its derivatives -------------------------------------------

    def log_partition(self, z: Tensor) -> Tensor:
        """``m(z)``, elementwise, convex and three times differentiable."""
        raise NotImplementedError(f"{type(self).__name__} must define log_partition(z)")

    def derivative(self, z: Tensor, order: int) -> Tensor:
        """The derivative of ``m`` of the given order at ``z`` (order 0 is ``m`` itself)."""
        closed = {0: self.log_partition, 1: self.mean, 2: self.variance, 3: self.third_derivative}
        if order in closed:
            return closed[order](z)
        return _differentiate(lambda u: self.derivative(u, order - 1), z)

    def mean(self, z: Tensor) -> Tensor:
        """``mu(z) = m'(z)``, the mean reward."""
        return _differentiate(self.log_partition, z)

    def variance(self, z: Tensor) -> Tensor:
        """``mu-dot(z) = m''(z) >= 0``; the variance of a reward is g times this."""
        return _differentiate(self.mean, z)

    def third_derivative(self, z: Tensor) -> Tensor:
        """``m'''(z)``."""
        return _differentiate(self.variance, z)

    # ---- the loss of an observation ------------------------------------------------------

    def nll(self, z: Tensor, r: Tensor) -> Tensor:
        """``(m(z) - r z) / g``: the negative log-likelihood without the terms free of z."""
        return (self.log_partition(z) - r * z) / self.dispersion

    def loss(self, z: Tensor, r: Tensor) -> Tensor:
        """:meth:`nll`, perhaps for less, up to the rounding of its terms; as in `loss_terms`."""
        return self.nll(z, r)

    def forward(self, z: Tensor, r: Tensor) -> Tensor:
        """The same as :meth:`nll`."""
        return self.nll(z, r)

    def slope(self, z: Tensor, r: Tensor) -> Tensor:
        """``(mu(z) - r) / g``, the derivative of the loss in z."""
        surprise = self.mean(z) - r
        return surprise if self.dispersion == 1.0 else surprise / self.dispersion

    def curvature(self, z: Tensor) -> Tensor:
        """``m''(z) / g``, the second derivative of the loss in z."""
        variance = self.variance(z)
        return variance if self.dispersion == 1.0 else variance / self.dispersion

    def slope_and_curvature(self, z: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Both; families share work here."""
        return self.slope(z, r), self.curvature(z)

    def loss_terms(self, z: Tensor, r: Tensor) -> LossTerms:
        """Loss, slope ``(mu(z) - r)/g`` and curvature ``m''(z)/g``; families share work here."""
        return LossTerms(self.nll(z, r), self.slope(z, r), self.curvature(z))

    def loss_derivatives(self, z: Tensor, r: Tensor, order: int) -> list[Tensor]:
        """The loss and its derivatives in z, up to an order >= 2; families share work here."""
        higher = [self.derivative(z, k) / self.dispersion for k in range(3, order + 1)]
        return [*self.loss_terms(z, r), *higher]

    def centred_loss(self, z: Tensor, r: Tensor) -> tuple[Tensor, Tensor] | None:
        """The loss as ``c(z, r) - k(r)`` with a c that is small where z fits r; None without one.

        Sums of c lose less to rounding than sums of the loss; k, which is free of z, is float64.
        """
        return None

    # ---- compiled derivatives ------------------------------------------------------------

    def compiled(self) -> CompiledFamily | None:
        """What compiled code knows of the family; None where it has no formulas for it.

        A class that inherits from a shipped family may have other formulas, so each shipped class
        answers for itself alone.
        """
        return None

    def _compiled_as(self, code: int, trials: float = 1.0, at_zero: float = 0.0) -> CompiledFamily:
        """With the constants that this family declares, and mu(0) if its rewards have no end."""
        rewards = *self.reward_range, self.integer_rewards, _largest(*self.reward_range, at_zero)
        return _compiled(code, trials, self.dispersion, *rewards)

    # ---- rewards -------------------------------------------------------------------------

    def sample(self, z: ArrayLike, generator: torch.Generator | None = None) -> Tensor:
        """Rewards drawn at ``z``, of the shape of ``z``."""
        raise NotImplementedError(f"{type(self).__name__} does not define sample(z, generator)")

    def quantile(self, z: Tensor, u: Tensor) -> Tensor:
        """The least reward r with ``P(reward <= r) >= u`` at ``z``, for u in (0, 1).

        A uniform u gives a reward of the family's law, and whoever shares u shares the luck.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define quantile(z, u)")

    def require_rewards(
        self, checks: ValueChecks, r: Tensor, name: str = "r", *, merged: bool = False
    ) -> None:
        """Adds to ``checks`` that ``r`` lies in the support; of ``merged`` rows, in its hull."""
        low, high = self.reward_range
        if not (math.isfinite(low) and math.isfinite(high)):
            checks.finite(name, r)
        if low > -math.inf or high < math.inf:
            checks.within(name, r, low, high, self._in_range)
        if self.integer_rewards and not merged:
            label = f"whole-number rewards of {type(self).__name__}"
            checks.require(name, r == torch.round(r), label, r)

    def _in_range(self) -> str:
        low, high = self.reward_range
        return f"rewards of {type(self).__name__} in [{low:g}, {high:g}]"

    def check_rewards(self, r: Tensor) -> None:
        """Raises :class:`InputError` unless every reward lies in the support."""
        check_float("r", r)
        checks = ValueChecks()
        self.require_rewards(checks, r)
        checks.settle()

    # ---- the constants of the theory -----------------------------------------------------

    def self_concordance(self, radius: float) -> float:
        """R_s: the least R with ``|m'''| <= R m''`` on ``[-radius, radius]``.

        The default searches a grid and adds the largest step between neighbours, which says nothing
        of a function that changes faster than the grid: it warns, once for each family object.
        Declare the exact constant, on which proofs rest.
        """
        self._warn_of_grid("self_concordance")
        variance, third = self._on_grid(2, radius), self._on_grid(3, radius)
        # where m'' underflows the ratio says nothing
        visible = variance > torch.finfo(variance.dtype).tiny
        ratio = torch.where(visible, third.abs() / variance, torch.zeros_like(variance))
        return _inflated_max(ratio)

    def max_variance(self, radius: float) -> float:
        """R_mudot: the maximum of ``m''`` on ``[-radius, radius]`` (default: a grid, warns)."""
        self._warn_of_grid("max_variance")
        return _inflated_max(self._on_grid(2, radius))

    def min_variance(self, radius: float) -> float:
        """``1/kappa``: the minimum of ``m''`` on ``[-radius, radius]`` (default: a grid, warns)."""
        self._warn_of_grid("min_variance")
        return max(0.0, -_inflated_max(-self._on_grid(2, radius)))

    def derivative_ratio(self, order: int, radius: float) -> float | None:
        """A bound on ``|m^(order)| / m''`` over ``[-radius, radius]``, or None where unknown.

        Order 3 is the self-concordance constant. Higher orders let solvers carry Taylor models
        of the loss forward with a certified remainder.
        """
        if order == 3:
            return self.self_concordance(radius)
        return None

    def require_convex(self, radius: float) -> None:
        """Refuses a log-partition that is not convex on ``[-radius, radius]``.

        Families of the library are; one that may not be looks at a grid.
        """

    def _warn_of_grid(self, name: str) -> None:
        """Says once for each object that a constant is a guess."""
        if getattr(self, "_warned", False):
            return
        self._warned = True
        warnings.warn(
            f"{type(self).__name__}.{name} is not declared: it is estimated on a grid, and so is "
            "every certificate that rests on it. Declare self_concordance, max_variance and "
            "min_variance.",
            UndeclaredConstantWarning,
            stacklevel=3,
        )

    def _on_grid(self, order: int, radius: float) -> Tensor:
        """The derivative of this order over ``[-radius, radius]``; refuses to hide a NaN."""
        check_positive("radius", radius)
        z = torch.linspace(-radius, radius, 4097, dtype=torch.float64, device="cpu")
        values = self.derivative(z, order)
        if not bool(torch.isfinite(values).all()):
            first = int(torch.nonzero(~torch.isfinite(values))[0])
            expected = f"a finite derivative of order {order} on [-{radius:g}, {radius:g}]"
            raise refuse(
                "log_partition", expected, f"{values[first].item()} at {z[first].item():g}"
            )
        # a curvature of 0 may be rounded to either side of it
        if order == 2 and bool((low := values.min()) < -1e-12 * values.abs().max()):
            place = z[int(values.argmin())].item()
            expected = f"a convex function on [-{radius:g}, {radius:g}]"
            raise refuse("log_partition", expected, f"a curvature of {low.item():g} at {place:g}")
        return values


@lru_cache(maxsize=256)
def _compiled(
    code: int,
    trials: float,
    dispersion: float,
    low: float,
    high: float,
    whole: bool,
    largest: float,
) -> CompiledFamily:
    """What compiled code knows: of these types and no others, since it is called unseen."""
    rewards = float(low), float(high), bool(whole), float(largest)
    return CompiledFamily(int(code), float(trials), 1.0 / float(dispersion), *rewards)


def largest_reward(family: GLMFamily) -> float:
    """c, the largest ``|r|``; where rewards have no end, of their finite end and ``|mu(0)|``."""
    at_zero = family.mean(torch.zeros((), dtype=torch.float64, device="cpu"))
    return _largest(*family.reward_range, float(at_zero))


def _largest(low: float, high: float, at_zero: float) -> float:
    ends = [abs(end) for end in (low, high) if math.isfinite(end)]
    return max(ends if len(ends) == 2 else [abs(at_zero), *ends])


def exponential(x: float) -> float:
    """``e^x``, infinite where it overflows."""
    return math.exp(x) if x < 709.0 else math.inf


def sampled_at(z: ArrayLike, generator: object) -> Tensor:
    """Where rewards are drawn, as floats; refuses a seed in the place of a generator."""
    if generator is not None and not isinstance(generator, torch.Generator):
        expected = "a torch.Generator, such as torch.Generator().manual_seed(0), or None"
        raise refuse("generator", expected, repr(generator))
    return as_floats("z", z)


def check_family(family: object, or_none: str = "") -> None:
    """Refuses what is no family; ``or_none`` says what else there may be.

    Example:
        >>> from torchglb.families import Bernoulli
        >>> check_family(Bernoulli())
        >>> try:
        ...     check_family("poisson")
        ... except ValueError as refused:
        ...     print(refused)
        family: expected a GLMFamily such as Bernoulli(), got str
    """
    if not isinstance(family, GLMFamily):
        raise refuse("family", f"a GLMFamily such as Bernoulli(){or_none}", kind_of(family))


def has_formulas_of(family: GLMFamily, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Whether m of a family is that of one of these classes: who inherits may have another.

    Example:
        >>> from torchglb.families import Bernoulli, Binomial
        >>> class Doubled(Bernoulli):
        ...     def log_partition(self, z):
        ...         return 2.0 * super().log_partition(z)
        >>> has_formulas_of(Bernoulli(), Binomial), has_formulas_of(Doubled(), Binomial)
        (True, False)
    """
    own = [kind for kind in kinds if type(family).log_partition is kind.log_partition]
    return isinstance(family, tuple(own))


def _differentiate(function: object, z: Tensor) -> Tensor:
    """The elementwise derivative of ``function`` at ``z``, itself differentiable."""
    if not callable(function):
        raise refuse("function", "a callable", type(function).__name__)
    if not z.is_floating_point():
        raise refuse("z", "a floating-point tensor", z.dtype)
    return torch.func.grad(lambda u: function(u).sum())(z)


def _inflated_max(values: Tensor) -> float:
    step = (values[1:] - values[:-1]).abs().max()
    return float(values.max() + step)
