"""The set of the centred radius: bounds against an independent solver, derivatives, saving."""

import copy
import io
import math

import mpmath
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii
from torchglb.errors import InputError
from torchglb.optim import Status
from torchglb.sets import CentredSet
from torchglb.ucb import ConvexRegion, SublevelProgram, support

DELTA = 0.05
FAMILIES = {
    "bernoulli": glb.Bernoulli(),
    "gaussian": glb.Gaussian(0.7),
    "poisson": glb.Poisson(),
    "probit": glb.QuasiBounded("probit"),
}


def rows(
    family: glb.GLMFamily, n: int, d: int, *batch: int, seed: int = 0, size: float = 1.5
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
    theta = torch.full((d,), size / math.sqrt(d), dtype=torch.float64)
    return X, family.sample(X @ theta, generator)


def sequence(
    family: glb.GLMFamily, d: int, radius: str | radii.Radius = "centred", S: float = 3.0, **options
) -> glb.ConfidenceSequence:
    return glb.ConfidenceSequence(family, glb.Ball(d, S), DELTA, radius, **options)


def current(family: glb.GLMFamily, n: int, d: int, **options) -> CentredSet:
    made = sequence(family, d, **options)
    made.update(*rows(family, n, d))
    found = made.current()
    assert isinstance(found, CentredSet)
    return found


def slsqp(found: CentredSet, x: np.ndarray) -> float:
    """max <x, theta> over ball, level, centred level: an independent solver, with its own loss."""
    family, loss = found.family, found.likelihood
    X, r = loss.X, loss.r
    _, level, ridge, center, _ = found.refinement

    def of(t: np.ndarray) -> tuple[float, np.ndarray]:
        z = X @ torch.from_numpy(t)
        value = float(((family.log_partition(z) - r * z) / family.dispersion).sum())
        slope = (family.mean(z) - r) / family.dispersion
        return value, (X.mT @ slope).numpy()

    lam, c = -float(ridge), center.numpy()
    S = float(found.domain.radius)

    def bent(t: np.ndarray) -> float:
        return float(level) - of(t)[0] + lam * (0.5 * t @ t - c @ t)

    constraints = [
        {
            "type": "ineq",
            "fun": lambda t: float(found.level) - of(t)[0],
            "jac": lambda t: -of(t)[1],
        },
        {"type": "ineq", "fun": bent, "jac": lambda t: -of(t)[1] + lam * (t - c)},
        {"type": "ineq", "fun": lambda t: S * S - t @ t, "jac": lambda t: -2 * t},
    ]
    solved = scipy.optimize.minimize(
        lambda t: -x @ t,
        found.center.numpy(),
        jac=lambda t: -x,
        method="SLSQP",
        constraints=constraints,
        tol=1e-12,
        options={"maxiter": 500},
    )
    # it may end outside of the set by its own tolerance: back towards the centre, into it
    inner, step = found.center.numpy(), solved.x - found.center.numpy()
    share = 1.0
    while min(c["fun"](inner + share * step) for c in constraints) < 0.0:
        share -= 1e-10
    assert share > 1.0 - 1e-6
    return float(x @ (inner + share * step))


# ---- bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_support_is_that_of_an_independent_solver(name):
    found = current(FAMILIES[name], 800, 3)
    assert float(found.scale) > 0
    generator = torch.Generator().manual_seed(5)
    arms = torch.nn.functional.normalize(torch.randn(5, 3, generator=generator).double(), dim=-1)
    result = found.support(arms)
    assert bool((result.status == Status.CONVERGED).all())
    assert bool(found.contains(result.theta).all())
    assert bool((result.upper >= result.lower).all())
    for k in range(5):
        value = slsqp(found, arms[k].numpy())
        assert float(result.upper[k]) >= value
        assert float(result.upper[k]) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("n", "dtype"), [(40, torch.float64), (3000, torch.float64), (300, torch.float32)]
)
def test_upper_is_never_below_the_exact_value(n, dtype):
    """Squared loss: the centred set is an ellipsoid, its support in 40 digits from the numbers."""
    mpmath.mp.dps = 40
    d, family = 3, glb.Gaussian(0.5)
    X, r = rows(family, n, d, size=1.0)
    X, r = (0.999 * X).to(dtype), r.to(dtype)
    made = sequence(family, d, S=40.0, dtype=dtype)
    made.update(X, r)
    found = made.current()
    program = found.centred_program
    loss = program.likelihood
    assert float(found.scale) > 0
    g, ridge = mpmath.mpf(family.dispersion), mpmath.mpf(float(loss.regularization))
    A, b = ridge * mpmath.eye(d), mpmath.matrix([mpmath.mpf(t) for t in loss.tilt.tolist()])
    for x, reward in zip(X.tolist(), r.tolist(), strict=True):
        for i in range(d):
            b[i] += mpmath.mpf(x[i]) * mpmath.mpf(reward) / g
            for j in range(d):
                A[i, j] += mpmath.mpf(x[i]) * mpmath.mpf(x[j]) / g
    inverse = A**-1
    center = inverse * b
    height = mpmath.mpf(float(program.level)) + (b.T * center)[0] / 2
    arms = torch.tensor([[1.0, 0.0, 0.0], [0.3, -0.7, 0.2], [0.0, 0.0, -1e-3]], dtype=dtype)
    result = support(program, arms)
    for k, x in enumerate(mpmath.matrix([mpmath.mpf(t) for t in arm]) for arm in arms.tolist()):
        exact = (x.T * center)[0] + mpmath.sqrt(2 * height * (x.T * inverse * x)[0])
        assert mpmath.mpf(float(result.upper[k])) >= exact >= mpmath.mpf(float(result.lower[k]))
        assert float(result.upper[k] - result.lower[k]) <= (
            1e-6 if dtype == torch.float64 else 1e-5
        )


def test_bounds_hold_for_every_point_of_the_set():
    found = current(glb.Bernoulli(), 300, 2)
    generator = torch.Generator().manual_seed(0)
    points = found.center + 2.0 * torch.randn(20_000, 2, generator=generator).double()
    points = points[found.contains(points)]
    assert len(points) > 200
    arms = torch.nn.functional.normalize(torch.randn(9, 2, generator=generator).double(), dim=-1)
    assert bool((points @ arms.mT <= found.upper_bound(arms)).all())
    # the boundary is inside, and what is farther is not
    edge = found.boundary(40)
    middle = edge.mean(-2)
    assert bool(found.contains(middle + 0.999 * (edge - middle)).all())
    assert not bool(found.contains(middle + 1.01 * (edge - middle)).any())
    assert bool((edge @ arms.mT <= found.upper_bound(arms) + 1e-9).all())


def test_narrower_than_the_uniform_prior_and_never_much_wider():
    for d, n, most in ((2, 30, 1.05), (2, 200, 1.05), (2, 5000, 0.95), (5, 5000, 0.87)):
        widths = []
        for radius in ("pac-bayes", "centred"):
            made = sequence(glb.Bernoulli(), d, radius, S=4.0)
            made.update(*rows(glb.Bernoulli(), n, d))
            widths.append(made.current().interval(torch.eye(d).double()).width)
        ratio = float((widths[1] / widths[0]).max())
        assert ratio <= most, (d, n, ratio)


def test_auto_is_centred_where_it_can_be():
    """With three quarters of delta for the uniform prior: at most some 4% wider early on."""
    made = sequence(glb.Poisson(), 2, "auto", S=1.0)
    assert made.radius == radii.Centred(uniform=0.75)
    family = glb.families.CustomFamily(
        torch.nn.functional.softplus,
        reward_range=(0.0, 1.0),
        self_concordance=1.0,
        max_variance=0.25,
        min_variance=lambda S: 1.0 / (2.0 + 2.0 * math.cosh(S)),
    )
    custom = sequence(family, 2, "auto")
    assert custom.radius == radii.PACBayes()
    custom.update([0.6, 0.8], 1.0)
    assert bool(custom.current().contains(torch.zeros(2).double()))
    for n in (3, 10, 30, 100):
        X, r = rows(glb.Bernoulli(), n, 1)
        widths = []
        for radius in ("pac-bayes", "auto"):
            one = sequence(glb.Bernoulli(), 1, radius, S=4.0)
            one.update(X, r)
            widths.append(float(one.current().interval([1.0]).width))
        assert widths[1] <= 1.045 * widths[0], (n, widths)


def test_both_constraints_active_give_the_smaller_bound():
    """A likelihood level that cuts the centred set: neither maximiser is in the other set."""
    family = glb.Bernoulli()
    X, _ = rows(family, 500, 2)
    X = X * torch.tensor([1.0, 0.3], dtype=torch.float64)
    r = family.sample(X.sum(-1), torch.Generator().manual_seed(1))
    made = sequence(family, 2)
    made.update(X, r)
    found = made.current()
    losses = found.likelihood.value(found.boundary(60))
    values = {name: getattr(found, name) for name in CentredSet.__dataclass_fields__}
    both = CentredSet(**values | {"level": 0.5 * (losses.amin() + losses.amax())})
    angle = torch.linspace(0.0, 6.2, 240, dtype=torch.float64)
    arms = torch.stack([angle.cos(), angle.sin()], dim=-1)
    result = both.support(arms)
    plain = glb.support(both.program, arms, center=both.theta_hat)
    assert bool((result.upper <= plain.upper).all())
    unsure = torch.nonzero(result.status == Status.INACCURATE)[:, 0].tolist()
    assert unsure, "one set holds the other's maximiser"
    for k in unsure[:4] + [0, 60]:
        value = slsqp(both, arms[k].numpy())  # accurate to some 1e-6
        assert float(result.lower[k]) <= value + 1e-5
        assert value <= float(result.upper[k]) + 1e-8
    assert bool(both.contains(result.theta).all())
    torch.testing.assert_close((result.theta * arms).sum(-1), result.lower, rtol=0, atol=1e-6)


def test_ellipsoid_and_sequence_of_ellipsoids_contain_the_set():
    found = current(glb.Bernoulli(), 600, 2)
    ellipsoid = found.ellipsoid()
    edge = found.boundary(40)
    assert bool(ellipsoid.contains(edge).all())
    made = sequence(glb.Bernoulli(), 2, ellipsoidal=True)
    made.update(*rows(glb.Bernoulli(), 600, 2))
    assert bool(made.current().contains(edge).all())


def test_other_solvers_are_refused():
    found = current(glb.Bernoulli(), 300, 2)
    with pytest.raises(InputError, match="solver: expected 'native' for a centred set"):
        found.support(torch.eye(2).double(), solver="conic")
    with pytest.raises(InputError, match="program: expected a program without a region"):
        support(found.centred_program, torch.eye(2).double(), "conic")


def test_negative_ridge_without_proof_is_refused():
    found = current(glb.Bernoulli(), 300, 2)
    program, arms = found.centred_program, torch.eye(2).double()
    bare = SublevelProgram(program.likelihood, program.domain, program.level)
    with pytest.raises(InputError, match="regularization: expected non-negative numbers"):
        support(bare, arms)
    center, shape, size, curvature = program.region.tensors()
    weak = ConvexRegion(center, shape, size, 0.0 * curvature)
    unproven = SublevelProgram(program.likelihood, program.domain, program.level, weak)
    with pytest.raises(InputError, match="no lower than minus the proven curvature"):
        support(unproven, arms)


def test_compiled_and_torch_solvers_agree():
    """The same set of a family that has no compiled formulas: the solver of devices."""

    class Plain(glb.Bernoulli):
        """Bernoulli as any class that is not shipped."""

    X, r = rows(glb.Bernoulli(), 400, 2, 2)
    bounds = []
    for family in (glb.Bernoulli(), Plain()):
        made = sequence(family, 2, batch_shape=(2,))
        made.update(X, r)
        found = made.current()
        assert bool((found.scale > 0).all())
        result = found.support(torch.eye(2).double().expand(2, 2, 2))
        assert bool((result.status == Status.CONVERGED).all())
        bounds.append((result.upper, result.lower))
    assert Plain().compiled() is None
    # the posterior that the compiled radius holds may differ by its tolerance
    torch.testing.assert_close(bounds[0][0], bounds[1][0], rtol=0, atol=0.02)
    assert bool((bounds[1][0] - bounds[1][1] <= 1e-6).all())


# ---- batches, dtypes, derivatives ---------------------------------------------------------------------


def test_batched_equals_loop_with_different_scales():
    family = glb.Bernoulli()
    X, r = rows(family, 700, 2, 3)
    w = (torch.arange(700) < torch.tensor([700, 60, 1])[:, None]).double()
    together = sequence(family, 2, batch_shape=(3,))
    together.update(X, r, w)
    found = together.current()
    arms = torch.eye(2).double()
    bounds = found.interval(arms.expand(3, 2, 2))
    assert float(found.scale[0]) > float(found.scale[1])
    assert float(found.scale[2]) == 0.0
    for b in range(3):
        alone = sequence(family, 2)
        alone.update(X[b], r[b], w[b])
        single = alone.current().interval(arms)
        torch.testing.assert_close(bounds.upper[b], single.upper, rtol=0, atol=1e-7)
        torch.testing.assert_close(bounds.lower[b], single.lower, rtol=0, atol=1e-7)
        torch.testing.assert_close(found[b].interval(arms).upper, bounds.upper[b])


def test_float32_errs_outwards():
    X, r = rows(glb.Bernoulli(), 2000, 2)
    X = (0.999 * X).float()
    small = sequence(glb.Bernoulli(), 2, dtype=torch.float32)
    small.update(X, r.float())
    wide = sequence(glb.Bernoulli(), 2)
    wide.update(X.double(), r)
    narrow, exact = small.current(), wide.current()
    assert narrow.level.dtype == narrow.refinement.level.dtype == torch.float32
    x = torch.eye(2)
    one, two = narrow.interval(x), exact.interval(x.double())
    assert one.upper.dtype == torch.float32
    # the held posterior may differ by its tolerance, no more
    torch.testing.assert_close(one.width.double(), two.width, rtol=0.02, atol=0)
    # its own set, in double precision: lambda, tilt and level were rounded outwards
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X.double(), r)
    lam, c = float(narrow.scale), narrow.refinement.center.double()
    level = float(narrow.refinement.level) - 0.5 * lam * float(c @ c)
    theta = exact.boundary(30)
    value = loss.value(theta) - 0.5 * lam * (theta - c).square().sum(-1)
    kept = theta[value <= level - 1e-9]
    assert bool((kept @ torch.eye(2).double() <= one.upper.double()).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_derivatives_through_rows_and_rewards(name):
    family = FAMILIES[name]
    X, r = rows(family, 60, 2, size=0.7)
    x = torch.tensor([0.6, 0.3], dtype=torch.float64)
    scales = []

    def through(X: Tensor, r: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        made = sequence(family, 2, S=2.0, validate=False)
        made.update(0.9 * X, r)
        found = made.current()
        scales.append(float(found.scale.detach()))
        interval = found.interval(x)
        return interval.lower, interval.upper

    given = tuple(t.clone().requires_grad_() for t in (X, r, x))
    lower, upper = through(*given)
    grads = torch.autograd.grad(upper - lower, given)
    assert scales[0] > 0
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):
        directions = [torch.randn(t.shape, generator=generator).double() for t in given]
        h = 1e-5
        ends = []
        for sign in (1, -1):
            # recorded, so that the posterior is centred exactly in each
            moved = [
                (t + sign * h * v).detach().requires_grad_()
                for t, v in zip(given, directions, strict=True)
            ]
            low, high = through(*moved)
            ends.append(float((high - low).detach()))
        slope = sum(float((g * v).sum()) for g, v in zip(grads, directions, strict=True))
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=2e-4, abs=2e-5)
    assert max(scales) > 0


# ---- tests of hypotheses ----------------------------------------------------------------------------


def test_e_values():
    X, r = rows(glb.Bernoulli(), 3000, 2)
    made = sequence(glb.Bernoulli(), 2)
    made.update(X, r)
    found = made.current()
    center = found.center
    # a hypothesis that the set excludes is rejected at delta, one that it holds is not
    upper = float(found.interval([1.0, 0.0]).upper)
    beyond = found.test([1.0, 0.0], upper + 1e-3, ">=")
    assert float(beyond.log_e) >= math.log(1 / DELTA) - 1e-9
    assert float(beyond.p) <= DELTA + 1e-12
    within = found.test([1.0, 0.0], upper - 1e-3, ">=")
    assert float(within.log_e) < math.log(1 / DELTA)
    # the centred prior has more to say than the uniform one alone
    evidence = found.refinement.outer - math.log(1 / DELTA)
    alone = glb.inference.likelihood_ratio_test(
        found.likelihood, found.domain, evidence, [1.0, 0.0], upper + 1e-3, ">=", theta_hat=center
    )
    assert float(alone.log_e) < float(beyond.log_e)
    assert float(found.test(torch.eye(2).double(), center).log_e) < 0


def test_e_values_by_quadrature():
    """d = 1: below the mixture of all priors, ``E exp(L(b) - L(nu))``, by mpmath, and close to it."""
    n, successes, S = 400, 240, 4.0
    made = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(1, S), DELTA, "centred")
    made.update(torch.ones(n, 1).double(), torch.tensor([1.0] * successes + [0.0] * 160).double())
    found, radius = made.current(), radii.Centred()
    assert float(found.scale) > 0

    def loss(theta):
        return n * mpmath.log1p(mpmath.exp(theta)) - successes * theta

    with mpmath.workdps(25):
        top = mpmath.log(mpmath.mpf(successes) / (n - successes))
        steps = [top + k * mpmath.mpf("0.1") for k in (-10, -3, -1, 0, 1, 3, 10)]
        least = loss(top)

        def ratio(theta):
            return mpmath.exp(least - loss(theta))

        uniform = mpmath.quad(ratio, [-S, *steps, S]) / (2 * S)
        for b in (0.05, 0.2, 0.4, 0.6, 0.7):
            total = radius.uniform * uniform
            for k in range(radius.scales):
                spread = S / mpmath.sqrt(mpmath.mpf(radius.ratio) ** k)
                law = lambda t: ratio(t) * mpmath.npdf(t, b, spread)  # noqa: E731, B023
                ends = [b + c * spread for c in (-12, -4, 0, 4, 12)]
                inner = [t for t in steps if ends[0] < t < ends[-1]]
                mean = mpmath.quad(law, sorted([*ends, *inner]))
                total += (1 - radius.uniform) / radius.scales * mean
            exact = float(loss(b) - least + mpmath.log(total))
            log_e = float(found.test([1.0], b).log_e)
            assert log_e <= exact
            # one posterior for all b, chosen for the size of the set; below 0 nothing is said
            assert max(log_e, 0.0) >= min(exact, math.log(1 / DELTA)) - 1.0


# ---- saving -------------------------------------------------------------------------------------------


def test_state_deepcopy_and_aggregation():
    X, r = rows(glb.Bernoulli(), 120, 2)
    made = sequence(glb.Bernoulli(), 2)
    made.update(X[:80], r[:80])
    made.current()
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    loaded = sequence(glb.Bernoulli(), 2)
    loaded.load_state_dict(torch.load(file))
    twin = copy.deepcopy(made)
    bounds = []
    for one in (made, loaded, twin):
        one.update(X[80:], r[80:])
        bounds.append(one.current().interval([0.6, 0.8]).upper)
    assert float(bounds[0]) == float(bounds[1]) == float(bounds[2])
    again = X[:4].repeat(200, 1), torch.cat([r[:4], 1 - r[:4]]).repeat(100)
    merged, plain = sequence(glb.Bernoulli(), 2, aggregate=True), sequence(glb.Bernoulli(), 2)
    merged.update(*again)
    plain.update(*again)
    assert float(merged.current().scale) > 0
    torch.testing.assert_close(
        merged.current().interval([1.0, 0.0]).upper, plain.current().interval([1.0, 0.0]).upper
    )


# ---- coverage ------------------------------------------------------------------------------------------


def count_misses(
    family: glb.GLMFamily,
    S: float,
    delta: float,
    replicates: int,
    horizon: int,
    *,
    size: float = 0.5,
    d: int = 2,
    adversarial: bool = False,
    seed: int = 0,
    looks: int = 12,
    kind: str = "plain",
) -> int:
    """In how many replicates theta* is outside of the set at one look or another.

    Or the e-value of the true theta* reaches 1/delta, which is to happen no more often.
    """
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(replicates, d, generator=generator, dtype=torch.float64)
    theta = size * S * torch.nn.functional.normalize(theta, dim=-1)
    number = max(12, 2 * d)  # arms that span, or nothing is proven convex
    arms = torch.randn(replicates, number, d, generator=generator, dtype=torch.float64)
    arms = torch.nn.functional.normalize(arms, dim=-1)
    made = glb.ConfidenceSequence(
        family,
        glb.Ball(d, S),
        delta,
        "centred",
        batch_shape=(replicates,),
        aggregate=kind == "plain",
        dtype=torch.float32 if kind == "float32" else torch.float64,
    )
    if kind == "float32":
        arms, theta = (0.999 * arms).float(), (0.999 * theta).float()
    whole = torch.eye(d, dtype=arms.dtype)
    missed = torch.zeros(replicates, dtype=torch.bool)
    refined = 0.0
    done = 0
    for k in range(1, looks + 1):
        steps = round(horizon ** (k / looks)) - done
        done += max(steps, 0)
        if steps <= 0:
            continue
        if adversarial and made.history.X.shape[-2]:
            # the arm along which the estimate is farthest from the truth
            away = made.current().center - theta
            index = (arms @ away[..., None])[..., 0].abs().argmax(-1)[:, None].expand(-1, steps)
        else:
            index = torch.randint(number, (replicates, steps), generator=generator)
        x = arms.gather(1, index[..., None].expand(-1, -1, d))
        z = (x * theta[:, None]).sum(-1)
        r, w = family.sample(z, generator), None
        if kind == "fractions":  # in [0, 1], with the right mean
            r = 0.7 * r + 0.3 * family.mean(z)
        if kind == "weights":
            w = torch.rand(r.shape, generator=generator, dtype=r.dtype)
        made.update(x, r, w)
        found = made.current()
        missed |= ~found.contains(theta) | (found.test(whole, theta).log_e >= -math.log(delta))
        refined += float((found.scale > 0).double().mean())
    assert refined > 0 or adversarial, "the centred sets were never used"
    return int(missed.sum())


def check(misses: int, replicates: int, delta: float) -> None:
    test = scipy.stats.binomtest(misses, replicates, delta, alternative="greater")
    assert test.pvalue >= 0.01, f"{misses} of {replicates} missed: significantly above {delta}"


def test_coverage():
    check(count_misses(glb.Bernoulli(), 4.0, 0.5, 60, 600), 60, 0.5)
    check(count_misses(glb.Gaussian(0.5), 2.0, 0.05, 60, 300, size=1.0), 60, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.5, 0.05])
@pytest.mark.parametrize("size", [0.5, 1.0])
@pytest.mark.parametrize("adversarial", [False, True])
@pytest.mark.parametrize(
    ("family", "S", "d"),
    [
        (glb.Bernoulli(), 4.0, 2),
        (glb.Bernoulli(), 0.2, 1),
        (glb.Bernoulli(), 4.0, 8),
        (glb.Gaussian(0.1), 4.0, 2),
        (glb.Poisson(), 3.0, 2),
        (glb.QuasiBounded("probit"), 2.0, 2),
    ],
)
def test_coverage_thoroughly(family, S, d, adversarial, size, delta):
    misses = count_misses(
        family, S, delta, 200, 3000, size=size, d=d, adversarial=adversarial, looks=25, seed=1
    )
    check(misses, 200, delta)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.5, 0.05])
@pytest.mark.parametrize(
    ("kind", "S", "d"),
    [("fractions", 4.0, 2), ("weights", 4.0, 2), ("float32", 4.0, 2), ("plain", 30.0, 2)]
    + [("plain", 4.0, 20)],
)
def test_coverage_of_other_data(kind, S, d, delta):
    horizon = 1000 if d < 20 else 4000  # in twenty dimensions a thousand rows prove nothing convex
    misses = count_misses(glb.Bernoulli(), S, delta, 100, horizon, d=d, kind=kind, looks=15, seed=2)
    check(misses, 100, delta)


def test_a_set_that_is_too_small_is_found_out():
    """The same count with a third of the height: so the test above can fail."""
    family, S, delta = glb.Gaussian(0.5), 2.0, 0.05
    generator = torch.Generator().manual_seed(0)
    X, _ = rows(family, 300, 2, 60)
    theta = torch.tensor([1.0, -0.5]).double()
    made = glb.ConfidenceSequence(family, glb.Ball(2, S), delta, "centred", batch_shape=(60,))
    missed = torch.zeros(60, dtype=torch.bool)
    for k in range(10):
        x = X[:, 30 * k : 30 * k + 30]
        made.update(x, family.sample(x @ theta, generator))
        found = made.current()
        slack = found.slack(theta.expand(60, 2))
        missed |= slack - 0.8 * found.slack(found.center) < 0
    with pytest.raises(AssertionError, match="significantly above"):
        check(int(missed.sum()), 60, delta)
