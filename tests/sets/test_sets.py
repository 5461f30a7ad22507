"""One contract for all confidence sets, and what is particular to each."""

import math

import mpmath
import pytest
import torch

import torchglb as glb
from torchglb.sets.base import on_mean_scale
from torchglb.testing.sets import ConfidenceSetContract, sampled, unit

S = 3.0


def ratio_set(
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    *,
    family: glb.GLMFamily | None = None,
    dim: int = 2,
    n: int = 40,
    beta2: float = 2.0,
    confined: bool = True,
    separable: bool = False,
    seed: int = 1,
) -> glb.LikelihoodRatioSet:
    """A set written out by hand: loss, minimiser, level."""
    family = family or glb.Bernoulli()
    X = unit(*batch, n, dim, seed=seed)
    z = 1.5 * (X * unit(*batch, 1, dim, seed=seed + 1)).sum(-1)
    if separable:  # the minimiser is on the sphere
        r = (z > 0).double()
    else:
        r = family.sample(z, torch.Generator().manual_seed(seed + 2))
    rows = glb.Rows(X.to(dtype), r.to(dtype))
    ball = glb.Ball(dim, S)
    fit = glb.constrained_mle(family, rows, ball)
    loss = glb.NegativeLogLikelihood(family, *rows)
    return glb.LikelihoodRatioSet(loss, ball, fit.loss + beta2, fit.theta, confined)


class TestLikelihoodRatioSet(ConfidenceSetContract):
    def make(self, batch=(), dtype=torch.float64):
        return ratio_set(batch, dtype)


class TestLikelihoodRatioSetOnTheSphere(ConfidenceSetContract):
    """Separable data: the centre is on the sphere, and most of the boundary too."""

    def make(self, batch=(), dtype=torch.float64):
        return ratio_set(batch, dtype, separable=True, n=12)

    def test_center_is_on_the_sphere(self):
        assert float(self.make().center.norm()) == pytest.approx(S)


class TestPoissonSet(ConfidenceSetContract):
    def make(self, batch=(), dtype=torch.float64):
        return ratio_set(batch, dtype, family=glb.Poisson(), n=15)


class TestUnconfinedSet(ConfidenceSetContract):
    """A set that may leave the ball, and here does."""

    def make(self, batch=(), dtype=torch.float64):
        return ratio_set(batch, dtype, family=glb.Gaussian(1.0), n=6, beta2=6.0, confined=False)

    def test_leaves_the_ball(self):
        made = self.make()
        assert bool((torch.linalg.vector_norm(made.boundary(60), dim=-1) > S).any())

    def test_boundary_points_are_on_the_boundary(self):
        made = self.make((3,))
        assert bool((made.slack(made.boundary(60)).abs() < 1e-6).all())


class TestEllipsoid(ConfidenceSetContract):
    def make(self, batch=(), dtype=torch.float64):
        return ratio_set(batch, dtype).ellipsoid()


class TestEllipsoidInTheBall(ConfidenceSetContract):
    def make(self, batch=(), dtype=torch.float64):
        return ratio_set(batch, dtype, n=12).ellipsoid(with_ball=True)

    def test_the_ball_matters(self):
        made = self.make()
        whole = glb.EllipsoidSet(made.family, made.domain, made.center, made.shape, made.gamma)
        assert float(made.volume()) < 0.9 * float(whole.volume())


class TestIntersection(ConfidenceSetContract):
    exact = False

    def make(self, batch=(), dtype=torch.float64):
        first = ratio_set(batch, dtype, n=40)
        rows = [
            t[..., :30, :] if t.ndim > len(batch) + 1 else t for t in first.likelihood.tensors()
        ]
        loss = glb.NegativeLogLikelihood(first.family, rows[0], rows[1][..., :30])
        fit = glb.constrained_mle(first.family, glb.Rows(loss.X, loss.r), first.domain)
        earlier = glb.LikelihoodRatioSet(loss, first.domain, fit.loss + 2.0, fit.theta)
        return earlier.intersect(first)

    def test_contains_is_that_of_all_members(self):
        made = self.make()
        points = 2.0 * unit(200, 2, seed=9)
        first, second = (member.contains(points) for member in made.members)
        assert bool((made.contains(points) == (first & second)).all())
        assert bool((first != second).any())

    def test_an_intersection_says_what_it_costs(self):
        def sequence(delta):
            made = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta)
            made.update([0.6, 0.8], 1.0)
            return made

        one, other = sequence(0.05), sequence(0.1)
        early, ellipsoid = one.current(), one.current().ellipsoid()
        one.update([0.6, -0.8], 1.0)
        shared = early.intersect(ellipsoid).intersect(one.current())
        assert shared.events == (one.event,)
        assert shared.delta == 0.05
        both = shared.intersect(other.current())
        assert both.events == (one.event, other.event)
        assert both.delta == pytest.approx(0.15)
        unknown = glb.sets.EllipsoidSet(
            glb.Bernoulli(), glb.Ball(2, 3.0), torch.zeros(2).double(), torch.eye(2).double(),
            torch.tensor(1.0).double(),
        )  # fmt: skip
        assert unknown.delta is None
        assert both.intersect(unknown).delta is None

    def test_intersections_flatten(self):
        made = self.make()
        assert len(made.intersect(made).members) == 4

    def test_bound_is_the_least(self):
        made = self.make()
        x = unit(5, 2, seed=10)
        bounds = torch.stack([member.upper_bound(x) for member in made.members])
        torch.testing.assert_close(made.upper_bound(x), bounds.amin(0), rtol=0, atol=0)

    def test_disjoint_sets_are_seen(self):
        far = [
            glb.EllipsoidSet(
                glb.Bernoulli(),
                glb.Ball(2, S),
                torch.tensor([place, 0.0]).double(),
                torch.eye(2).double(),
                torch.tensor(0.25).double(),
            )
            for place in (-1.0, 1.0)
        ]
        empty = far[0].intersect(far[1])
        interval = empty.interval([1.0, 0.0])
        assert float(interval.lower) > float(interval.upper)
        with pytest.raises(glb.InputError, match="may be empty"):
            empty.volume()

    def test_sets_of_another_batch_are_refused(self):
        with pytest.raises(glb.InputError, match="other: expected shape"):
            ratio_set().intersect(ratio_set((3,)))


# ---- particulars ---------------------------------------------------------------------------------


class TestParticulars:
    def test_slack_is_level_minus_loss(self):
        made = ratio_set()
        theta = torch.tensor([0.3, -0.2]).double()
        expected = made.level - made.likelihood(theta)
        torch.testing.assert_close(made.slack(theta), expected)
        assert float(made.slack(torch.tensor([S, 0.1]).double())) == -math.inf
        torch.testing.assert_close(made.radius, torch.tensor(2.0).double())

    @pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Gaussian(1.0), glb.Poisson()])
    @pytest.mark.parametrize("n", [5, 60])
    def test_ellipsoid_contains_the_set(self, family, n):
        made = ratio_set(family=family, n=n)
        points, _ = sampled(made)
        points = torch.cat([points, made.boundary(400)])
        assert len(points) > 500
        outer = made.ellipsoid()
        assert bool((outer.slack(points) >= -1e-9).all())
        inside = glb.EllipsoidSet(
            outer.family, outer.domain, outer.center, outer.shape, 0.02 * outer.gamma
        )
        assert not bool(inside.contains(points).all())  # the check can fail

    @pytest.mark.parametrize("dim", [1, 3, 6])
    def test_volume_of_an_ellipsoid(self, dim):
        """A linear image of the ball: by its singular values, and for d = 3 by sampling."""
        A = torch.randn(dim, dim, generator=torch.Generator().manual_seed(11)).double()
        W = torch.linalg.inv(A @ A.mT)
        made = glb.EllipsoidSet(
            glb.Bernoulli(),
            glb.Ball(dim, S),
            torch.zeros(dim).double(),
            W,
            torch.tensor(2.5).double(),
        )
        axes = math.sqrt(2.5) * torch.linalg.svdvals(A)
        unit_ball = {1: 2.0, 3: 4.0 * math.pi / 3.0, 6: math.pi**3 / 6.0}[dim]
        assert float(made.volume()) == pytest.approx(unit_ball * float(axes.prod()), rel=1e-9)
        if dim == 3:
            half = made.upper_bound(torch.eye(3).double())
            u = torch.rand((100000, 3), generator=torch.Generator().manual_seed(12)).double()
            share = float(made.contains((2 * u - 1) * half).double().mean())
            assert float(made.volume()) == pytest.approx(share * float((2 * half).prod()), rel=0.02)

    @pytest.mark.parametrize("dim", [1, 2, 4])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
    def test_bound_with_the_ball(self, dim, scale):
        """Never above either bound alone, never below a point of the intersection."""
        generator = torch.Generator().manual_seed(13)
        A = torch.randn(dim, dim, generator=generator).double()
        center = 2.5 * unit(dim, seed=14)
        gamma = torch.tensor(scale).double()
        shape = A @ A.mT + 0.1 * torch.eye(dim).double()
        common = (glb.Bernoulli(), glb.Ball(dim, S), center, shape, gamma)
        plain, both = glb.EllipsoidSet(*common), glb.EllipsoidSet(*common, with_ball=True)
        x = unit(20, dim, seed=15)
        bound = both.upper_bound(x)
        assert bool((bound <= plain.upper_bound(x)).all())
        assert bool((bound <= S * (1 + 1e-12)).all())
        found = both.support(x)
        assert bool((found.gap <= 1e-6).all())
        assert bool((found.gap >= 0).all())
        inner = center + (1 - 1e-9) * (found.theta - center)
        assert bool(both.contains(inner).all())

    def test_unbounded_directions_are_infinite(self):
        """One direction observed, no ball: the other has no end."""
        X = torch.tensor([[1.0, 0.0]] * 20).double()
        r = torch.tensor([1.0] * 12 + [0.0] * 8).double()
        ball = glb.Ball(2, S)
        fit = glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), ball)
        loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r)
        free = glb.LikelihoodRatioSet(loss, ball, fit.loss + 2.0, fit.theta, confined=False)
        linear = free.interval(torch.eye(2).double())
        mean = free.interval(torch.eye(2).double(), scale="mean")
        assert linear.lower[1] == -math.inf
        assert linear.upper[1] == math.inf
        assert bool(torch.isfinite(linear.upper[0]))
        assert bool(torch.isfinite(linear.lower[0]))
        assert mean.lower[1] == 0.0
        assert mean.upper[1] == 1.0
        assert float(free.volume()) == math.inf
        assert bool((free.support(torch.eye(2).double()).upper[1:] == math.inf).all())
        held = glb.LikelihoodRatioSet(loss, ball, fit.loss + 2.0, fit.theta)
        assert float(held.interval([0.0, 1.0]).upper) == pytest.approx(S, abs=1e-6)
        with pytest.raises(glb.InputError, match="keeps to the ball"):
            free.ellipsoid()

    def test_infinite_means_of_other_families(self):
        """The mean at infinity is the end of the rewards' range, whatever mu(inf) computes to."""
        family = glb.CustomFamily(lambda z: torch.sqrt(1 + z * z), reward_range=(-1.0, 1.0))
        ball = glb.Ball(2, S)
        X = torch.zeros(1, 2).double()
        loss = glb.NegativeLogLikelihood(family, X, X[:, 0])
        level = loss(torch.zeros(2).double()) + 1.0
        made = glb.LikelihoodRatioSet(loss, ball, level, torch.zeros(2).double(), confined=False)
        mean = made.interval([1.0, 0.0], scale="mean")
        assert (float(mean.lower), float(mean.upper)) == (-1.0, 1.0)

    @pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Poisson()])
    def test_conic_solver_agrees(self, family):
        made = ratio_set((2,), family=family, dim=3)
        x = unit(2, 3, 3, seed=16)
        native, conic = made.support(x), made.support(x, solver="conic")
        torch.testing.assert_close(native.upper, conic.upper, rtol=1e-5, atol=1e-5)
        both = made.interval(x, solver="conic")
        torch.testing.assert_close(both.lower, made.interval(x).lower, rtol=1e-5, atol=1e-5)

    def test_area_needs_two_dimensions(self):
        for made in (ratio_set(dim=3), ratio_set(dim=3).ellipsoid(with_ball=True)):
            with pytest.raises(glb.InputError, match="dim: expected 2"):
                made.volume()

    def test_ellipsoid_takes_no_options(self):
        with pytest.raises(glb.InputError, match="options: expected none"):
            ratio_set().ellipsoid().interval([1.0, 0.0], tol=1e-3)

    def test_ellipsoid_refuses_other_matrices(self):
        made = ratio_set().ellipsoid()
        bad = glb.EllipsoidSet(made.family, made.domain, made.center, -made.shape, made.gamma)
        with pytest.raises(glb.InputError, match="positive definite"):
            bad.interval([1.0, 0.0])
        with pytest.raises(glb.InputError, match="gamma: expected shape"):
            glb.EllipsoidSet(made.family, made.domain, made.center, made.shape, made.gamma[None])

    def test_empty_history(self):
        """Without data the set is the ball."""
        X = torch.zeros(0, 2).double()
        loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, X[:, 0])
        zero = torch.zeros(2).double()
        made = glb.LikelihoodRatioSet(loss, glb.Ball(2, S), torch.tensor(3.0).double(), zero)
        assert float(made.interval([0.6, 0.8]).upper) == pytest.approx(S)
        assert float(made.volume()) == pytest.approx(math.pi * S * S)
        assert not bool(made.contains([S, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_no_ellipsoid_is_refused_by_every_question(dtype):
    c, W = torch.zeros(2, dtype=dtype), torch.eye(2, dtype=dtype)
    for shape, gamma, name in ((-W, 1.0, "shape"), (W, -1.0, "gamma")):
        region = glb.EllipsoidSet(
            glb.Bernoulli(), glb.Ball(2, 3.0), c, shape, torch.tensor(gamma, dtype=dtype)
        )
        for ask in (region.upper_bound, region.interval, region.support):
            with pytest.raises(glb.InputError, match=name):
                ask(W)


def test_short_arms_of_an_unconfined_set_keep_their_values():
    """Within a tolerance any point attains the value of a short arm: where says nothing then."""
    torch.manual_seed(0)
    X = torch.nn.functional.normalize(torch.randn(30, 2).double(), dim=-1)
    X[:, 1] *= 0.05
    rewards = (torch.rand(30) < 0.7).double()
    sequence = glb.ConfidenceSequence(
        glb.Bernoulli(), glb.Ball(2, 1.0), 0.05, radius="gaussian-prior"
    )
    sequence.update(X, rewards)
    region, x = sequence.current(), torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.6, 0.8]]).double()
    long = region.support(x)
    assert (torch.isfinite(long.upper) & (long.upper > 3.0)).any()
    for size in (1e-8, 1e-12, 1e-200):
        short = region.support(size * x)
        assert (short.upper >= size * long.lower).all()
        torch.testing.assert_close(short.upper / size, long.upper)


MEANS = {
    "bernoulli": lambda z: 1 / (1 + mpmath.exp(-z)),
    "poisson": mpmath.exp,
    "probit": mpmath.ncdf,
    "cloglog": lambda z: -mpmath.expm1(-mpmath.exp(z)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MEANS)
def test_means_are_rounded_outwards(name, dtype):
    """Without rows the ends are those of the ball, exactly."""
    shipped = {"bernoulli": glb.Bernoulli(), "poisson": glb.Poisson()}
    family, S = shipped.get(name) or glb.QuasiBounded(name), 5.7
    none = glb.NegativeLogLikelihood(
        family, torch.zeros(0, 1, dtype=dtype), torch.zeros(0, dtype=dtype)
    )
    region = glb.LikelihoodRatioSet(
        none, glb.Ball(1, S), torch.tensor(1.0, dtype=dtype), torch.zeros(1, dtype=dtype)
    )
    x = torch.rand(200, 1, dtype=dtype, generator=torch.Generator().manual_seed(0))
    lower, upper = region.interval(x, scale="mean")
    with mpmath.workdps(40):
        for k in range(200):
            end = mpmath.mpf(S) * x[k, 0].item()
            assert lower[k].item() <= MEANS[name](-end)
            assert upper[k].item() >= MEANS[name](end)
    found = family.mean(region.interval(x).upper)
    torch.testing.assert_close(upper, found, rtol=64 * torch.finfo(dtype).eps, atol=0.0)


def test_a_mean_beyond_all_numbers_is_infinite():
    none = glb.NegativeLogLikelihood(
        glb.Poisson(), torch.zeros(0, 1).double(), torch.zeros(0).double()
    )
    region = glb.LikelihoodRatioSet(none, glb.Ball(1, 1e3), 1.0, [0.0])
    assert region.interval([1.0], scale="mean").upper == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_ellipsoid_of_one_point_in_the_ball_has_bounds(dtype):
    center = torch.tensor([0.3, -0.4, 0.1], dtype=dtype)
    shape = torch.diag(torch.tensor([1.0, 100.0, 3.0], dtype=dtype))
    point = glb.EllipsoidSet(glb.Bernoulli(), glb.Ball(3, 1.0), center, shape, 0.0, with_ball=True)
    x = unit(5, 3).to(dtype)
    lower, upper = point.interval(x)
    assert (lower <= x @ center).all()
    assert (x @ center <= upper).all()
    assert (upper - lower < 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_ellipsoid_around_a_set_pays_for_the_rounding_of_its_loss(dtype, generator):
    """In one dimension the set is known: in float32 its loss of some 1e7 is off by one."""
    S, sigma, n = 30.0, 0.1, 30_000
    X = torch.where(torch.rand(n, 1, dtype=torch.float64, generator=generator) < 0.5, -1.0, 1.0)
    r = 20.0 * X[:, 0] + sigma * torch.randn(n, dtype=torch.float64, generator=generator)
    sequence = glb.ConfidenceSequence(glb.Gaussian(sigma), glb.Ball(1, S), 0.05, dtype=dtype)
    sequence.update(X.to(dtype), r.to(dtype))
    region = sequence.current()
    with mpmath.workdps(40):
        g = mpmath.mpf(sigma) ** 2
        pairs = zip(X[:, 0].tolist(), r.to(dtype).tolist(), strict=True)
        slope = mpmath.fsum(x * y for x, y in pairs) / g
        # n z^2/2g - slope z <= level
        height = mpmath.mpf(float(region.level)) + slope**2 * g / (2 * n)
        half, middle = mpmath.sqrt(2 * g * height / n), slope * g / n
        printed = glb.ConfidenceSequence(
            glb.Gaussian(sigma),
            glb.Ball(1, S),
            0.05,
            dtype=dtype,
            ellipsoidal=True,
            ellipsoid="theorem",
        )
        printed.update(X.to(dtype), r.to(dtype))
        sharp = region.ellipsoid(regularization=1e-9)
        for made in (region.ellipsoid(), sharp, printed.current()):
            lower, upper = made.interval([1.0])
            assert mpmath.mpf(float(lower)) <= middle - half
            assert mpmath.mpf(float(upper)) >= middle + half


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-193])
def test_lower_bounds_of_short_arms_pay_for_rounding_too(size, generator):
    """A set that is the ball: the support is ``S |x|``, which a lower bound came out above."""
    for _ in range(50):
        arm = size * torch.randn(3, dtype=torch.float64, generator=generator)
        S = 1.0 + float(torch.rand((), dtype=torch.float64, generator=generator))
        wide = 1e-9 * torch.eye(3, dtype=torch.float64)
        made = glb.EllipsoidSet(
            glb.Bernoulli(), glb.Ball(3, S), torch.zeros(3).double(), wide, 1.0, with_ball=True
        )
        found = made.support(arm[None])
        with mpmath.workdps(40):
            exact = mpmath.mpf(S) * mpmath.norm(mpmath.matrix(arm.tolist()))
            assert mpmath.mpf(float(found.lower)) <= exact <= mpmath.mpf(float(found.upper))


def test_a_mean_that_underflows_is_not_0():
    for link in ("probit", "cloglog"):
        ends = glb.sets.Interval(torch.tensor([-900.0]), torch.tensor([-800.0]))
        lower, upper = on_mean_scale(glb.families.QuasiBounded(link), ends)
        assert lower == 0.0
        assert upper > 0.0


@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Binomial(7), glb.Poisson()], ids=str)
def test_a_mean_that_has_lost_its_digits_is_rounded_outwards(family):
    """On the way to underflow an exponential has few digits, and torch's sigmoid none."""
    trials = getattr(family, "trials", 1)
    for z in torch.linspace(-760.0, -650.0, 223, dtype=torch.float64):
        lower, upper = on_mean_scale(family, glb.Interval(z, z))
        with mpmath.workdps(30):
            exact = trials * mpmath.exp(float(z))  # the others are less by one in e^-z
            assert mpmath.mpf(float(lower)) <= exact <= mpmath.mpf(float(upper))


@pytest.mark.parametrize("thin", [1e-7, 1e-8, 1e-9])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_unconfined_bound_that_rounding_leaves_open_is_infinite(thin, seed):
    """Rows that nearly depend on each other: the set goes on far beyond the ball of the search."""
    generator = torch.Generator().manual_seed(seed)
    sigma = 1e-3
    X = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    X = X * torch.tensor([1.0, thin]).double() @ torch.tensor([[0.6, 0.5], [1.0, 0.0]]).double()
    X = X / torch.linalg.vector_norm(X, dim=-1).max()
    r = 2.0 * X[:, 0] + sigma * torch.randn(40, generator=generator, dtype=torch.float64)
    domain = glb.Ball(2, 10.0)
    sequence = glb.ConfidenceSequence(glb.Gaussian(sigma), domain, 0.05, "gaussian-prior")
    sequence.update(X, r)
    made = sequence.current()
    arms = torch.cat([torch.eye(2).double(), X[:4], X[:2].mean(0, keepdim=True)])
    upper = made.support(arms, throw=False).upper.tolist()
    with mpmath.workdps(50):
        rows, rewards = (mpmath.matrix((t / sigma).tolist()) for t in (X, r))
        hessian, moment = rows.T * rows, rows.T * rewards
        center = mpmath.lu_solve(hessian, moment)
        height = mpmath.mpf(float(made.level)) + (moment.T * center)[0] / 2
        for x, bound in zip((mpmath.matrix(arm.tolist()) for arm in arms), upper, strict=True):
            form = (x.T * mpmath.lu_solve(hessian, x))[0]
            value = (x.T * center)[0] + mpmath.sqrt(2 * height * form)
            assert value <= bound


@pytest.mark.parametrize("S", [4.0, 10.0])
def test_ends_of_rays_are_found_in_few_evaluations(S, monkeypatch):
    """Also where one end of a search has met the level to the last digit."""
    generator = torch.Generator().manual_seed(0)
    X = torch.nn.functional.normalize(torch.randn(2000, 2, generator=generator).double(), dim=-1)
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S), delta=0.05)
    sequence.update(X, glb.Bernoulli().sample(X @ torch.tensor([0.7, 0.7]).double() * S, generator))
    region, calls = sequence.current(), []
    evaluate = type(region)._slack

    def counted(self, points):
        calls.append(points.shape)
        return evaluate(self, points)

    monkeypatch.setattr(type(region), "_slack", counted)
    close = float(region.volume(64))
    assert len(calls) <= 90
    calls.clear()
    assert float(region.volume(64, tol=1e-4)) == pytest.approx(close, rel=1e-4)
    assert len(calls) <= 80
