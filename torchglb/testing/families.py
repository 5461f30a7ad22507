"""What every family must do. A test class inherits and says what is exact."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import mpmath
import pytest
import torch
from mpmath import mp

from torchglb.errors import InputError
from torchglb.families import GLMFamily
from torchglb.families.base import LossTerms

DTYPES = [torch.float32, torch.float64]
HALF = [
    1e-8,
    1e-3,
    0.1,
    0.5,
    1.0,
    2.0,
    2.9,
    3.1,
    5.0,
    8.0,
    13.0,
    20.0,
    36.0,
    50.0,
    88.0,
    300.0,
    700.0,
]
GRID = [-z for z in reversed(HALF)] + [0.0, *HALF]
RADII = [0.1, 1.0, 4.0, 10.0]


def grid(dtype: torch.dtype, limit: float = 700.0) -> torch.Tensor:
    z = torch.tensor(GRID, dtype=dtype)
    return z[z.abs() <= limit]


def assert_exact(
    got: torch.Tensor,
    z: torch.Tensor,
    exact: Callable[[mpmath.mpf], mpmath.mpf],
    slope: Callable[[mpmath.mpf], mpmath.mpf],
    roundings: float = 8.0,
) -> None:
    """``got`` is ``exact(z)`` as if z had been perturbed by a few roundings, in relative terms.

    What underflows must be at most the smallest normal number, what overflows the largest number.
    """
    info = torch.finfo(got.dtype)
    assert torch.isfinite(got).all()
    for point, value in zip(z.tolist(), got.tolist(), strict=True):
        true = exact(mp.mpf(point))
        if abs(true) > info.max:
            assert abs(value) >= 0.9 * info.max, f"at {point}: {value}, overflow of {true}"
            continue
        spread = abs(true) + abs(point * slope(mp.mpf(point)))
        error = abs(value - true)
        assert error <= roundings * info.eps * spread + info.tiny, (
            f"at {point}: got {value}, exact {mpmath.nstr(true, 17)},"
            f" off by {mpmath.nstr(error / (info.eps * spread), 3)} roundings"
        )


class FamilyContract:
    """What every family must keep. Subclasses define ``make`` and ``exact``, and may narrow the rest.

    Example:
        >>> import torchglb as glb
        >>> class TestBernoulli(FamilyContract):
        ...     good_rewards, bad_rewards = [0.0, 1.0], [-1.0, 0.5]
        ...     def make(self):
        ...         return glb.Bernoulli()
        >>> TestBernoulli().make()
        Bernoulli(trials=1)
    """

    good_rewards: list[float]
    bad_rewards: list[float]
    highest_order = 4  # of the derivatives that are compared
    closed_limit = 700.0  # up to here |z| keeps full precision
    sample_points = (-2.0, 0.0, 1.5)

    @pytest.fixture(autouse=True)
    def _high_precision(self):
        with mp.workdps(350):  # 1 - e^-700 is not 1
            yield

    def make(self) -> GLMFamily:
        """The family under test."""
        raise NotImplementedError

    def exact(self, order: int) -> Callable[[mpmath.mpf], mpmath.mpf]:
        """The derivative of m of this order in arbitrary precision."""
        raise NotImplementedError

    @pytest.fixture
    def family(self) -> GLMFamily:
        """The family under test, anew for each test."""
        return self.make()

    # ---- m and its derivatives -----------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("order", range(4))
    def test_derivative_is_exact(self, family, order, dtype):
        z = grid(dtype, self.closed_limit)
        got = family.derivative(z, order)
        assert got.dtype == dtype
        assert got.shape == z.shape
        self.assert_derivative(got, z, order)

    def assert_derivative(self, got, z, order):
        """That a derivative of m is right; weaker for a family that only says what m is."""
        assert_exact(got, z, self.exact(order), self.exact(order + 1))

    @pytest.mark.parametrize("order", [2, 3, 4, 5, 6, 7])
    def test_derivatives_of_the_loss_together_are_those_alone(self, family, order):
        z = torch.linspace(-8.0, 8.0, 33, dtype=torch.float64)
        r = family.mean(z).flip(0)
        together = family.loss_derivatives(z, r, order)
        assert len(together) == order + 1
        for found, alone in zip(together, family.loss_terms(z, r), strict=False):
            torch.testing.assert_close(found, alone, rtol=0.0, atol=0.0)
        for k, found in enumerate(together[3:], start=3):
            alone = family.derivative(z, k) / family.dispersion
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-15)

    def test_higher_derivatives(self, family):
        for order in range(4, self.highest_order + 1):
            z = grid(torch.float64, 13.0)
            exact = z.new_tensor([float(self.exact(order)(mp.mpf(v))) for v in z.tolist()])
            scale = exact.abs() + family.variance(z)
            error = (family.derivative(z, order) - exact).abs()
            assert (error <= 1e-10 * scale).all(), order

    def test_named_methods_are_the_derivatives(self, family):
        z = grid(torch.float64, 13.0)
        for order, method in enumerate(
            [family.log_partition, family.mean, family.variance, family.third_derivative]
        ):
            assert torch.equal(method(z), family.derivative(z, order))

    @pytest.mark.parametrize("name", ["mean", "variance", "third_derivative"])
    def test_closed_form_is_the_autograd_default(self, family, name):
        z = grid(torch.float64, 30.0)
        closed = getattr(family, name)(z)
        default = getattr(GLMFamily, name)(family, z)
        scale = 1e-12 * closed.abs().max()
        torch.testing.assert_close(default, closed, rtol=1e-9, atol=float(scale))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nothing_overflows(self, family, dtype):
        limit = self.closed_limit
        z = torch.linspace(-limit, limit, 2801, dtype=dtype)
        r = torch.full_like(z, self.good_rewards[-1])
        outputs = [family.derivative(z, order) for order in range(4)]
        outputs += [family.nll(z, r), *family.loss_terms(z, r)]
        for output in outputs:
            assert output.dtype == dtype
            assert torch.isfinite(output).all()
        assert (family.variance(z) >= 0).all()

    def test_any_shape(self, family):
        z = torch.linspace(-2, 2, 12, dtype=torch.float64)
        for shape in [(), (1,), (0,), (3, 4), (2, 3, 2)]:
            part = z[: math.prod(shape)].reshape(shape)
            r = torch.full_like(part, self.good_rewards[0])
            for output in (family.mean(part), family.nll(part, r), *family.loss_terms(part, r)):
                assert output.shape == part.shape

    # ---- the loss ------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nll_is_exact(self, family, dtype):
        z = grid(dtype, self.closed_limit)
        m, mean = self.exact(0), self.exact(1)
        g = mp.mpf(family.dispersion)
        for reward in self.good_rewards:
            r = torch.full_like(z, reward)
            self.assert_loss(
                family.nll(z, r),
                z,
                lambda t, reward=mp.mpf(r[0].item()): (m(t) - reward * t) / g,
                lambda t, reward=mp.mpf(r[0].item()): (mean(t) - reward) / g,
            )

    def assert_loss(self, got, z, exact, slope):
        """Small against the largest term; families without cancellation override with more."""
        info = torch.finfo(got.dtype)
        for point, value in zip(z.tolist(), got.tolist(), strict=True):
            true, t = exact(mp.mpf(point)), mp.mpf(point)
            terms = abs(true) + abs(slope(t) * t) + abs(self.exact(0)(t)) + abs(t)
            if terms < info.max / 8:
                assert abs(value - true) <= 8 * info.eps * terms, (point, value, true)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_loss_terms_are_the_loss_and_its_derivatives(self, family, dtype):
        z = grid(dtype, min(self.closed_limit, 80.0))
        eps, g = torch.finfo(dtype).eps, family.dispersion
        for reward in self.good_rewards:
            r = torch.full_like(z, reward)
            terms = family.loss_terms(z, r)
            assert isinstance(terms, LossTerms)
            # the sum over many rows needs the loss up to rounding of its terms; nll keeps the tails
            scale = (family.log_partition(z).abs() + z.abs() * (1 + r.abs())) / g
            assert ((terms.loss - family.nll(z, r)).abs() <= 8 * eps * scale).all()
            slope = (family.mean(z) - r) / g
            scale = (family.mean(z).abs() + r.abs()) / g
            assert ((terms.slope - slope).abs() <= 8 * eps * scale).all()
            torch.testing.assert_close(
                terms.curvature, family.variance(z) / g, rtol=8 * eps, atol=0
            )
            both = family.slope_and_curvature(z, r)
            torch.testing.assert_close(both, (family.slope(z, r), family.curvature(z)))

    def test_dispersion_divides_the_loss(self, family):
        z = grid(torch.float64, 5.0)
        r = torch.full_like(z, self.good_rewards[0])
        expected = (family.log_partition(z) - r * z) / family.dispersion
        torch.testing.assert_close(family.nll(z, r), expected, rtol=1e-12, atol=1e-12)

    def test_gradients_flow_through_loss_terms(self, family):
        z = torch.linspace(-2, 2, 5, dtype=torch.float64, requires_grad=True)
        r = torch.full_like(z, self.good_rewards[0], requires_grad=True)
        assert torch.autograd.gradcheck(lambda z, r: tuple(family.loss_terms(z, r)), (z, r))

    # ---- rewards -------------------------------------------------------------------------

    def test_good_rewards_pass(self, family):
        family.check_rewards(torch.tensor(self.good_rewards, dtype=torch.float64))
        family.check_rewards(torch.tensor(self.good_rewards, dtype=torch.float32))
        family.check_rewards(torch.zeros(0))

    def test_bad_rewards_are_named(self, family):
        for bad in [*self.bad_rewards, math.nan, math.inf, -math.inf]:
            rewards = torch.tensor([[self.good_rewards[0]], [bad]], dtype=torch.float64)
            with pytest.raises(InputError, match=r"^r: expected .*, got .*at index \(1, 0\)"):
                family.check_rewards(rewards)
        with pytest.raises(InputError, match="r: expected .* got .*int64"):
            family.check_rewards(torch.tensor([0, 1]))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_samples_have_the_right_moments(self, family, generator, dtype):
        n = 40_000
        z = torch.tensor(self.sample_points, dtype=dtype)[:, None].expand(-1, n)
        r = family.sample(z, generator)
        assert r.shape == z.shape
        assert r.dtype == dtype
        family.check_rewards(r)
        r, z = r.double(), z[:, 0].double()
        mean, variance = r.mean(-1), r.var(-1)
        assert ((mean - family.mean(z)).abs() <= 4.5 * (variance / n).sqrt()).all()
        # the standard error of a variance, from the fourth moment
        fourth = ((r - mean[:, None]) ** 4).mean(-1)
        error = 4.5 * ((fourth - variance**2).clamp_min(0.0) / n).sqrt() + 10 / n
        self.assert_variance(variance, family.dispersion * family.variance(z), error)

    def assert_variance(self, variance, declared, error):
        """That samples vary as declared, up to the error of so many."""
        assert ((variance - declared).abs() <= error).all()

    def test_samples_follow_the_generator(self, family):
        z = torch.zeros(50, dtype=torch.float64)
        first, second = (family.sample(z, torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(first, second)
        other = family.sample(z, torch.Generator().manual_seed(4))
        assert not torch.equal(first, other)

    # ---- the constants -------------------------------------------------------------------

    @pytest.mark.parametrize("radius", RADII)
    def test_constants_bound(self, family, radius):
        points = [radius * mp.mpf(k) / 40 for k in range(-40, 41)]
        variance = [self.exact(2)(z) for z in points]
        slack = 1 + 1e-12
        assert max(variance) <= family.max_variance(radius) * slack
        assert min(variance) >= family.min_variance(radius) / slack
        assert family.min_variance(radius) >= 0
        third = [abs(self.exact(3)(z)) for z in points]
        ratio = max(t / v for t, v in zip(third, variance, strict=True))
        assert ratio <= family.self_concordance(radius) * slack + 1e-300
        for order in range(3, 9):
            bound = family.derivative_ratio(order, radius)
            if bound is not None:
                derivative = [abs(self.exact(order)(z)) for z in points]
                ratio = max(t / v for t, v in zip(derivative, variance, strict=True))
                assert ratio <= bound * slack + 1e-300, order

    def test_constants_of_a_large_ball(self, family):
        for radius in (100.0, 2000.0):
            assert family.self_concordance(radius) >= 0
            assert family.max_variance(radius) > 0
            assert family.min_variance(radius) >= 0

    # ---- a torch module ------------------------------------------------------------------

    def test_is_a_module(self, family):
        assert isinstance(family, torch.nn.Module)
        z, r = torch.zeros(3), torch.full((3,), self.good_rewards[0])
        assert torch.equal(family(z, r), family.nll(z, r))
        family.load_state_dict(family.state_dict())
        assert torch.equal(copy.deepcopy(family).mean(z), family.mean(z))
        assert torch.equal(pickle.loads(pickle.dumps(family)).mean(z), family.mean(z))
        assert torch.nn.ModuleList([family])[0] is family

    def test_works_under_transforms(self, family):
        z = torch.linspace(-2, 2, 6, dtype=torch.float64)
        assert torch.allclose(torch.vmap(family.mean)(z), family.mean(z), rtol=1e-14)
        slope = torch.vmap(torch.func.grad(lambda t: family.mean(t)))(z)
        torch.testing.assert_close(slope, family.variance(z))
