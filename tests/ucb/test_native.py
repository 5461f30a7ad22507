"""The native solver: shapes, batches, dtypes, closed forms, and every way to fail."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from programs import family_of, random_program, stack_programs

import torchglb as glb
from torchglb.optim import Status
from torchglb.ucb import Conic, Native, native_support
from torchglb.ucb.bounds import draw_back
from torchglb.ucb.solvers.conic import layer
from torchglb.ucb.solvers.conic.oracle import ConicResult


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FIELDS = ("upper", "lower", "theta", "multiplier", "gap", "status")


def rows(batch, n, d, generator, S=3.0, family="bernoulli"):
    """Features in the unit ball, and rewards of a parameter of norm 0.7 S."""
    X = torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    X = X * torch.rand(*batch, n, 1, generator=generator, dtype=torch.float64)
    theta = torch.randn(*batch, d, 1, generator=generator, dtype=torch.float64)
    theta = 0.7 * S * torch.nn.functional.normalize(theta, dim=-2)
    return X, family_of(family).sample((X @ theta)[..., 0], generator)


def make(batch, n, d, generator, S=3.0, beta2=2.0, family="bernoulli", dtype=torch.float64, K=4):
    """A batch of programs with level ``min L + beta2``, and arms."""
    X, r = rows(batch, n, d, generator, S, family)
    fit = glb.constrained_mle(family_of(family), glb.Rows(X, r), glb.Ball(d, S))
    arms = torch.randn(*batch, K, d, generator=generator, dtype=torch.float64)
    arms = torch.nn.functional.normalize(arms, dim=-1)
    loss = glb.NegativeLogLikelihood(family_of(family), X.to(dtype), r.to(dtype))
    level = (fit.loss + beta2).to(dtype)
    return glb.SublevelProgram(loss, glb.Ball(d, S), level), arms.to(dtype)


def element(program, index):
    """One program of a batch."""
    return program.rebuild(tuple(t[index] for t in program.tensors()))


def indices(shape):
    return list(torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist())


# ---- closed forms ---------------------------------------------------------------------------


def test_gaussian_disc_inside_the_ball():
    X, r = torch.eye(2).double(), torch.tensor([1.0, 0.0]).double()
    loss = glb.NegativeLogLikelihood(glb.Gaussian(), X, r)  # |theta - r|^2/2 - 1/2
    program = glb.SublevelProgram(loss, glb.Ball(2, 2.0), torch.tensor(-0.375).double())
    result = glb.support(program, X)
    torch.testing.assert_close(result.upper, torch.tensor([1.5, 0.5]).double())
    torch.testing.assert_close(result.theta, torch.tensor([[1.5, 0.0], [1.0, 0.5]]).double())
    # dh/dB of the radius sqrt(2 (B + 1/2)) at 1/2
    torch.testing.assert_close(result.multiplier, torch.tensor([2.0, 2.0]).double())


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_without_observations_the_ball_remains(d, level):
    nothing = torch.zeros(0, d).double()
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), nothing, nothing[:, 0])
    program = glb.SublevelProgram(loss, glb.Ball(d, 2.5), torch.tensor(level).double())
    arms = torch.cat([torch.eye(d), torch.zeros(1, d)]).double()
    result = glb.support(program, arms)
    torch.testing.assert_close(result.upper, torch.tensor([2.5] * d + [0.0]).double())
    torch.testing.assert_close(result.theta[:-1], 2.5 * torch.eye(d).double())
    assert not result.multiplier.any()


def test_zero_arm_has_value_zero(generator):
    program, arms = make((3,), 30, 4, generator)
    arms[:, 1] = 0.0
    result = glb.support(program, arms)
    assert (result.status == Status.CONVERGED).all()
    assert not result.upper[:, 1].any()
    assert not result.lower[:, 1].any()
    assert program.domain.contains(result.theta).all()
    assert (program.likelihood(result.theta) <= program.level[:, None] * (1 + 1e-12)).all()


@pytest.mark.parametrize("family", ["bernoulli", "gaussian", "poisson"])
@pytest.mark.parametrize("S", [0.7, 3.0, 15.0])
def test_result_is_consistent(family, S, generator):
    """lower is attained by a feasible theta, and the optimality conditions hold."""
    program, arms = make((2,), 40, 3, generator, S=S, family=family)
    result = glb.support(program, arms)
    assert (result.lower <= result.upper).all()
    attained = (arms * result.theta).sum(-1)
    assert (result.lower <= attained).all()  # rounded down, by some roundings of S |x|
    torch.testing.assert_close(result.lower, attained, rtol=0, atol=1e-14 * max(1.0, S))
    value, gradient = program.likelihood.value_and_gradient(result.theta)
    assert (value <= program.level[:, None] + 1e-12 * (1 + program.level.abs()[:, None])).all()
    assert (torch.linalg.vector_norm(result.theta, dim=-1) <= S * (1 + 1e-15)).all()
    assert (result.multiplier >= 0).all()
    # the gap bounds the dual residual: alpha (B - L + <g, theta>) + S|x - alpha g| - <x, theta>
    rest = arms - result.multiplier[..., None] * gradient
    dual = result.multiplier * (program.level[:, None] - value)
    dual = dual + S * torch.linalg.vector_norm(rest, dim=-1) - (rest * result.theta).sum(-1)
    assert (dual <= 1e-6 * (1 + result.upper.abs())).all()


def test_multiplier_is_the_derivative_in_the_level(generator):
    program, arms = make((), 60, 3, generator)
    h = 1e-4
    values = [
        glb.support(
            glb.SublevelProgram(program.likelihood, program.domain, program.level + step),
            arms,
            tol=1e-13,
            throw=False,
        ).lower
        for step in (-h, h)
    ]
    expected = (values[1] - values[0]) / (2 * h)
    actual = glb.support(program, arms, tol=1e-12, throw=False).multiplier
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_larger_levels_and_balls_have_larger_values(generator):
    program, arms = make((), 50, 3, generator)
    previous = None
    for factor in (0.5, 0.75, 1.0, 1.5, 3.0):
        loss, S = program.likelihood, 3.0 * factor
        fit = glb.constrained_mle(loss.family, glb.Rows(loss.X, loss.r), glb.Ball(3, 1.5))
        bigger = glb.SublevelProgram(loss, glb.Ball(3, S), fit.loss + 2.0 * factor)
        result = glb.support(bigger, arms)
        if previous is not None:
            assert (result.upper >= previous.lower).all()
            assert (result.upper > previous.upper).any()
        previous = result


# ---- shapes, batches, dtypes ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("given", [False, True], ids=["centred", "center given"])
def test_batch_equals_loop(shape, given, generator):
    program, arms = make(shape, 30, 3, generator)
    center = None
    if given:
        loss = program.likelihood
        fit = glb.constrained_mle(loss.family, glb.Rows(loss.X, loss.r), program.domain)
        center = fit.theta
    together = native_support(program, arms, center=center)
    K = arms.shape[-2]
    for name in FIELDS:
        tail = (K, 3) if name == "theta" else (K,)
        assert getattr(together, name).shape == (*shape, *tail)
    for index in indices(shape) if shape else []:
        index = tuple(index)
        alone = native_support(
            element(program, index), arms[index], center=None if center is None else center[index]
        )
        for name in FIELDS:
            expected, actual = getattr(alone, name), getattr(together, name)[index]
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_center_changes_nothing_but_the_start(generator):
    program, arms = make((4,), 40, 3, generator)
    loss = program.likelihood
    fit = glb.constrained_mle(loss.family, glb.Rows(loss.X, loss.r), program.domain)
    # any feasible point will do: here one on the way from the minimiser to the boundary
    edge = native_support(program, arms).theta[:, 0]
    results = [
        native_support(program, arms, center=center)
        for center in (None, fit.theta, 0.5 * (fit.theta + edge))
    ]
    for result in results:
        assert (result.status == Status.CONVERGED).all()
        assert (result.upper >= results[0].lower).all()
        assert (result.lower <= results[0].upper).all()
        assert (result.gap <= 3e-8 * (1 + result.upper.abs())).all()


@pytest.mark.parametrize("d", [2, 6])
def test_companions_do_not_matter(d, generator):
    """Bit for bit: an element's answer does not depend on what else is in the batch."""
    program, arms = make((6,), 40, d, generator)
    before = native_support(program, arms)
    # companions that need many more steps, and others that fail
    data = [t.clone() for t in program.tensors()]
    X, r, radius, level = data
    X[1::2] = X[1::2] * 1e-3
    level[3] = -1.0
    X[5, 0, 0] = torch.nan
    after = native_support(program.rebuild((X, r, radius, level)), arms, throw=False)
    for name in FIELDS:
        assert torch.equal(getattr(before, name)[::2], getattr(after, name)[::2]), name


def test_permuting_the_batch_permutes_the_answers(generator):
    program, arms = make((5,), 30, 3, generator)
    order = torch.tensor([3, 0, 4, 1, 2])
    before = native_support(program, arms)
    after = native_support(element(program, order), arms[order])
    # Not bit by bit: torch's vectorised softplus rounds the last elements of an array, which do not fill
    # a vector register, otherwise than the rest. An ulp of the loss is all that may differ.
    z = torch.randn(150, generator=generator, dtype=torch.float64)
    turned = torch.nn.functional.softplus(z.flip(0)).flip(0)
    torch.testing.assert_close(turned, torch.nn.functional.softplus(z), rtol=1e-15, atol=1e-15)
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(before, name)[order], getattr(after, name), rtol=1e-12, atol=1e-12
        )


def test_arms_do_not_see_each_other(generator):
    program, arms = make((2,), 40, 3, generator, K=6)
    together = native_support(program, arms)
    for k in range(6):
        alone = native_support(program, arms[:, k : k + 1])
        assert alone.upper.shape == (2, 1)
        for name in FIELDS:
            expected = getattr(alone, name)[:, 0]
            torch.testing.assert_close(
                getattr(together, name)[:, k], expected, rtol=1e-9, atol=1e-9
            )


def test_no_arms_and_no_problems(generator):
    program, arms = make((2,), 10, 3, generator)
    nothing = native_support(program, arms[:, :0])
    assert nothing.upper.shape == (2, 0)
    assert nothing.theta.shape == (2, 0, 3)
    nobody = native_support(element(program, slice(0)), arms[:0])
    assert nobody.upper.shape == (0, 4)
    assert nobody.theta.shape == (0, 4, 3)


@pytest.mark.parametrize("family", ["bernoulli", "gaussian", "poisson"])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_float32_stays_float32_and_encloses(family, d, generator):
    program, arms = make((3,), 60, d, generator, family=family, dtype=torch.float32)
    result = native_support(program, arms)
    assert (result.status == Status.CONVERGED).all()
    for name in FIELDS[:-1]:
        assert getattr(result, name).dtype == torch.float32, name
    # the program with these very numbers, in double precision
    data = tuple(t.double() for t in program.tensors())
    exact = native_support(program.rebuild(data), arms.double())
    assert (result.upper.double() >= exact.lower).all()
    assert (result.lower.double() <= exact.upper + 1e-4 * (1 + exact.upper.abs())).all()
    assert (result.gap <= 1e-3 * (1 + result.upper.abs())).all()


def test_weights_repeat_rows_and_zero_drops_them(generator):
    X, r = rows((), 20, 3, generator)
    arms = torch.nn.functional.normalize(torch.randn(4, 3, generator=generator).double(), dim=-1)
    w = torch.tensor([0.0, 1.0, 2.0, 3.0] * 5).double()
    repeated = glb.NegativeLogLikelihood(
        glb.Bernoulli(), X.repeat_interleave(w.long(), 0), r.repeat_interleave(w.long(), 0)
    )
    weighted = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, w)
    level = glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r, w), glb.Ball(3, 3.0)).loss + 2.0
    a, b = (
        native_support(glb.SublevelProgram(loss, glb.Ball(3, 3.0), level), arms)
        for loss in (repeated, weighted)
    )
    torch.testing.assert_close(a.upper, b.upper, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(a.theta, b.theta, rtol=1e-7, atol=1e-7)


def test_one_radius_per_problem(generator):
    program, arms = make((3,), 40, 2, generator, S=2.0)
    radii = torch.tensor([2.0, 2.5, 9.0]).double()
    several = glb.SublevelProgram(program.likelihood, glb.Ball(2, radii), program.level)
    together = native_support(several, arms)
    for b in range(3):
        loss = element(program, b).likelihood
        alone = glb.SublevelProgram(loss, glb.Ball(2, float(radii[b])), program.level[b])
        expected = native_support(alone, arms[b])
        torch.testing.assert_close(together.upper[b], expected.upper, rtol=1e-9, atol=1e-9)


def test_tilted_and_ridged_losses(generator):
    """A tilt is a linear term: for a Gaussian it moves the centre of the ellipsoid."""
    X, r = rows((), 30, 2, generator, family="gaussian")
    tilt = torch.tensor([1.0, -2.0]).double()
    loss = glb.NegativeLogLikelihood(glb.Gaussian(), X, r, regularization=0.5, tilt=tilt)
    H = X.mT @ X + 0.5 * torch.eye(2)
    center = torch.linalg.solve(H, X.mT @ r + tilt)
    level = loss(center) + 0.8
    arms = torch.eye(2).double()
    result = native_support(glb.SublevelProgram(loss, glb.Ball(2, 50.0), level), arms)
    expected = center + (2 * 0.8 * torch.linalg.inv(H).diagonal()).sqrt()
    torch.testing.assert_close(result.upper, expected, rtol=1e-8, atol=1e-8)


def test_solvers_share_one_door(generator):
    program, arms = make((), 12, 2, generator, K=2)
    native, oracle, differentiable = (
        glb.support(program, arms, solver=name) for name in ("native", "conic", "layer")
    )
    assert isinstance(oracle, ConicResult)
    for other in (oracle, differentiable):
        torch.testing.assert_close(native.upper, other.upper, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(native.theta, other.theta.detach(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(native.multiplier, other.multiplier.detach(), rtol=1e-3, atol=0)
    assert layer.max_capacity(2) >= 12
    with pytest.raises(glb.InputError, match="solver"):
        glb.support(program, arms, solver="simplex")


# ---- failures -------------------------------------------------------------------------------


def test_infeasible_level_stays_in_its_element(generator):
    program, arms = make((4,), 40, 3, generator)
    level = program.level.clone()
    level[1] = level[1] - 2.1  # beta2 was 2
    level[3] = -1.0
    broken = glb.SublevelProgram(program.likelihood, program.domain, level)
    before, after = native_support(program, arms), native_support(broken, arms, throw=False)
    assert (after.status[[1, 3]] == Status.INFEASIBLE).all(), after.status
    assert (after.upper[[1, 3]] == -torch.inf).all()
    assert (after.lower[[1, 3]] == -torch.inf).all()
    assert torch.isnan(after.theta[[1, 3]]).all()
    for name in FIELDS:
        assert torch.equal(getattr(before, name)[[0, 2]], getattr(after, name)[[0, 2]]), name
    with pytest.raises(glb.SolverError, match=r"INFEASIBLE .*\(1, 0\).*\(3, 3\)") as caught:
        native_support(broken, arms)
    assert "(0, 0)" not in str(caught.value)


@pytest.mark.parametrize("share", [1e-12, 1e-9, 1e-6, 1e-3, 0.5])
def test_barely_infeasible_is_never_called_converged(share, generator):
    program, arms = make((), 80, 3, generator, beta2=0.0)
    level = program.level - share * program.level.abs()
    result = native_support(
        glb.SublevelProgram(program.likelihood, program.domain, level), arms, throw=False
    )
    expected = {int(Status.INFEASIBLE), int(Status.INACCURATE)}
    assert set(result.status.tolist()) <= expected
    if share >= 1e-6:
        assert (result.status == Status.INFEASIBLE).all()
    assert (result.lower == -torch.inf).all()


@pytest.mark.parametrize("where", ["X", "r", "level"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_element(where, bad, generator):
    program, arms = make((3,), 40, 3, generator)
    X, r, radius, level = (t.clone() for t in program.tensors())
    if where == "X":
        X[1, 5, 2] = bad
    elif where == "r":
        r[1, 5] = bad
    else:
        level[1] = bad
    broken = program.rebuild((X, r, radius, level))
    before, after = native_support(program, arms), native_support(broken, arms, throw=False)
    if where == "level" and bad == torch.inf:
        # the loss constraint is void: the ball remains
        assert (after.status == Status.CONVERGED).all()
        torch.testing.assert_close(after.upper[1], torch.full((4,), 3.0).double())
        return
    assert (after.status[1] == Status.NONFINITE).all(), after.status
    for name in FIELDS[:-1]:
        assert not torch.isfinite(getattr(after, name)[1]).any() or name == "multiplier"
    for name in FIELDS:
        assert torch.equal(getattr(before, name)[::2], getattr(after, name)[::2]), name
    with pytest.raises(glb.SolverError, match=r"NONFINITE .*\(1, 0\)") as caught:
        native_support(broken, arms)
    assert "(0, 0)" not in str(caught.value)


def test_step_limit_keeps_the_bounds_true(generator):
    program, arms = make((4,), 60, 3, generator, S=15.0)
    # arms that the first evaluation settles: zero ones
    arms[0] = 0.0
    full = native_support(program, arms)
    capped = native_support(program, arms, max_steps=1, throw=False)
    assert (capped.status[0] == Status.CONVERGED).all()
    assert (capped.status[1:] == Status.MAX_STEPS).all(), capped.status
    assert (capped.upper >= full.lower).all()
    assert (capped.lower <= full.upper).all()
    assert (capped.gap[1:] > 3e-8).all()
    assert torch.equal(capped.upper[0], full.upper[0])
    with pytest.raises(glb.SolverError, match=r"MAX_STEPS .*\(1, 0\)") as caught:
        native_support(program, arms, max_steps=1)
    assert "(0, 0)" not in str(caught.value)


def test_every_step_tightens_the_bounds(generator):
    program, arms = make((2,), 200, 4, generator)
    full = native_support(program, arms)
    previous = None
    for steps in range(1, 8):
        capped = native_support(program, arms, max_steps=steps, throw=False)
        assert (capped.upper >= full.lower).all()
        assert (capped.lower <= full.upper).all()
        if previous is not None:
            assert (capped.upper <= previous.upper).all()
            assert (capped.lower >= previous.lower).all()
        previous = capped
    # quadratic convergence: a handful of passes
    assert (previous.status == Status.CONVERGED).all()


def test_infeasible_center_gives_no_lower_bound(generator):
    program, arms = make((2,), 200, 3, generator)
    center = native_support(program, arms).theta[:, 0]
    center[0] = -3.0 * torch.nn.functional.normalize(center[0], dim=0)
    assert program.likelihood(center)[0] > program.level[0]
    result = native_support(program, arms, center=center, throw=False)
    assert (result.status[0] != Status.CONVERGED).all()
    assert (result.lower[0] == -torch.inf).all()
    exact = native_support(program, arms)
    assert (result.upper[0] >= exact.lower[0]).all()
    assert (result.status[1] == Status.CONVERGED).all()


def test_bad_arguments_are_refused(generator):
    program, arms = make((2,), 10, 3, generator)
    with pytest.raises(glb.InputError, match="arms: expected shape"):
        native_support(program, arms[0])
    with pytest.raises(glb.InputError, match="arms: expected shape"):
        native_support(program, arms[..., :2])
    with pytest.raises(glb.InputError, match="arms: expected a dense tensor of real"):
        native_support(program, arms.cfloat())
    spoiled = arms.clone()
    spoiled[1, 2, 0] = torch.nan
    with pytest.raises(glb.InputError, match=r"arms.*finite.*\(1, 2, 0\)"):
        native_support(program, spoiled)
    with pytest.raises(glb.InputError, match="center"):
        native_support(program, arms, center=torch.zeros(3).double())
    with pytest.raises(glb.InputError, match="level"):
        glb.SublevelProgram(program.likelihood, program.domain, program.level[0])
    with pytest.raises(glb.InputError, match="dim 3"):
        glb.SublevelProgram(program.likelihood, glb.Ball(2, 1.0), program.level)


def test_passes_do_not_grow_with_the_history(generator):
    """The number of steps is that of a quadratically converging method, whatever n is."""
    for n in (10, 100, 1000, 5000):
        program, arms = make((), n, 3, generator, beta2=math.log(20 * n))
        result = native_support(program, arms, max_steps=12)
        assert (result.status == Status.CONVERGED).all()


def test_stacked_random_programs_equal_single_ones():
    """Different kinds of programs in one batch: equal shapes, unlike in everything else."""
    cases = [random_program(seed, max_n=30, max_d=3) for seed in range(0, 192, 8)]
    alike = [
        c for c in cases if c.program.likelihood.X.shape == cases[0].program.likelihood.X.shape
    ]
    sizes = {}
    for case in cases:
        key = (type(case.program.likelihood.family), case.program.likelihood.X.shape)
        sizes.setdefault(key, []).append(case)
    alike = max(sizes.values(), key=len)
    assert len(alike) >= 2
    result = native_support(
        stack_programs([c.program for c in alike]), torch.stack([c.arms for c in alike])
    )
    for b, case in enumerate(alike):
        alone = native_support(case.program, case.arms)
        assert (result.upper[b] >= alone.lower).all()
        assert (result.lower[b] <= alone.upper).all()


def test_a_point_of_infinite_loss_is_drawn_back_to_the_hub():
    """Where a loss overflows, the point is not feasible; where it is unknown, nothing is claimed."""
    inf, nan = float("inf"), float("nan")
    loss = torch.tensor([0.5, 3.0, inf, nan, 3.0, inf], dtype=torch.float64)
    level = torch.tensor([2.0, 2.0, 2.0, 2.0, inf, inf], dtype=torch.float64)
    point, center = loss.new_ones(6, 1), loss.new_zeros(6, 1)
    found = draw_back(point, loss, center, loss.new_ones(6), level)[:, 0]
    np.testing.assert_allclose(found, [1.0, 0.5, 0.0, nan, 1.0, 1.0], atol=1e-14)


#: in a wide ball the loss is made of planes with sharp edges: rows, rewards, arm
EDGED = [
    ([[-0.27, -0.27], [0.54, 0.36]], [1.0, 1.0], [-1.0, -0.2]),
    ([[0.45, 0.54], [-0.27, 0.36]], [1.0, 0.0], [-0.8, 0.6]),
    ([[0.36, 0.54], [-0.54, -0.63]], [0.0, 0.0], [0.4, 0.9]),
    ([[0.27, 0.36], [0.0, 0.63], [0.9, 0.09]], [1.0, 1.0, 0.0], [-0.2, -1.0]),
    ([[-0.36, 0.72], [-0.18, -0.9], [0.18, 0.18]], [0.0, 1.0, 0.0], [-0.4, 0.9]),
]


def edged(X, r, arm, **options):
    X, r, arm = (torch.tensor(t, dtype=torch.float64) for t in (X, r, arm))
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, **options)
    program = glb.SublevelProgram(loss, glb.Ball(2, 100.0), X.new_full(X.shape[:-2], 6.0))
    return program, arm[..., None, :]


@pytest.mark.parametrize("case", EDGED)
@pytest.mark.parametrize("tilted", [False, True])
def test_edges_that_no_quadratic_model_sees(case, tilted):
    options = {"tilt": torch.tensor([0.01, -0.02], dtype=torch.float64)} if tilted else {}
    program, arm = edged(*case, **options)
    found, oracle = native_support(program, arm), glb.support(program, arm, "conic")
    assert float(found.gap) <= 3e-8 * (1 + float(found.upper))
    assert float(oracle.lower) - 1e-6 <= float(found.upper) <= float(oracle.upper) + 1e-5
    assert float(program.likelihood(found.theta)) <= 6.0
    assert float(torch.linalg.vector_norm(found.theta)) <= 100.0


def test_edges_of_some_companions_do_not_matter():
    """Some arms end with the search for a price, others by the quadratic model."""
    chosen = [EDGED[0], EDGED[1], (EDGED[0][0], [1.0, 0.0], [1.0, 0.0])]
    program, arms = edged(*zip(*chosen, strict=True))
    arms = torch.cat([arms, -arms, arms.flip(0)], dim=1)
    together = native_support(program, arms)
    for i, k in indices((3, 3)):
        alone = native_support(element(program, (i,)), arms[i, k : k + 1])
        for name in FIELDS:
            one, part = getattr(alone, name), getattr(together, name)[i, k : k + 1]
            torch.testing.assert_close(part, one, rtol=1e-9, atol=1e-9)


def test_solver_objects_are_the_names_with_their_settings(generator):
    program, arms = make((), 30, 2, generator)
    named = glb.support(program, arms, tol=1e-6)
    assert torch.equal(named.upper, glb.support(program, arms, Native(tol=1e-6)).upper)
    conic = glb.support(program, arms, Conic(tol=1e-6))
    assert (conic.upper >= named.lower).all()
    with pytest.raises(glb.InputError, match="options: expected settings of Native.*toll"):
        glb.support(program, arms, toll=1e-6)
    with pytest.raises(glb.InputError, match="options: expected none beside a solver object"):
        glb.support(program, arms, Native(), tol=1e-6)
    with pytest.raises(glb.InputError, match="solver: expected a solver or its name"):
        glb.support(program, arms, 3)


def test_arms_do_not_depend_on_each_other(generator):
    """Bit by bit: alone, in another order, and beside other problems."""
    program, arms = make((3,), 60, 3, generator)
    whole = native_support(program, arms)
    turned = native_support(program, arms.flip(1))
    assert torch.equal(whole.upper.flip(1), turned.upper)
    assert torch.equal(whole.lower.flip(1), turned.lower)
    for b in range(3):
        alone = native_support(element(program, (b,)), arms[b, :1])
        assert torch.equal(alone.upper, whole.upper[b, :1])
        assert torch.equal(alone.theta, whole.theta[b, :1])


@pytest.mark.parametrize("size", [1e-162, 1e-200, 1e-310])
def test_short_arms_keep_their_values(size, generator):
    program, arms = make((), 30, 2, generator)
    long, short = native_support(program, arms), native_support(program, size * arms)
    assert (short.upper > 0).any()
    assert (short.upper >= size * long.lower * (1 - 1e-12)).all()
    torch.testing.assert_close(short.upper / size, long.upper, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [2, 40], ids=["compiled", "torch"])
def test_bounds_that_underflow_are_rounded_outwards(dim, dtype):
    """Without rows the value is S |x|, of some of the least positive numbers."""
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    none = torch.zeros(0, dim, dtype=dtype), torch.zeros(0, dtype=dtype)
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *none)
    arms = torch.zeros(40, dim, dtype=dtype)
    arms[:, 0] = least * torch.arange(40, dtype=dtype)
    for S in (0.3, 0.7, 1.0):
        found = native_support(glb.SublevelProgram(loss, glb.Ball(dim, S), 1.0), arms)
        for k in range(40):
            exact = Fraction(S) * Fraction(arms[k, 0].item())
            assert Fraction(found.lower[k].item()) <= exact <= Fraction(found.upper[k].item())
        assert found.upper[0] == found.lower[0] == 0.0


def test_corners_of_ball_and_level_are_closed_to_all_digits():
    """A step that met the sphere to 1e-11 missed the level by omega S^2 as much, for good."""
    generator = torch.Generator().manual_seed(4)
    B, n, d = 3000, 30, 2
    X = torch.randn(B, n, d, generator=generator, dtype=torch.float64)
    X = X / X.norm(dim=-1, keepdim=True).clamp_min(1.0)
    family, ball = glb.Bernoulli(), glb.Ball(d, 4.0)
    r = family.sample(3.0 * X[..., 0], generator)
    loss = glb.NegativeLogLikelihood(family, X, r)
    level = glb.constrained_mle(family, glb.Rows(X, r), ball).loss + 4.0
    arms = torch.randn(B, 6, d, generator=generator, dtype=torch.float64)
    found = native_support(glb.SublevelProgram(loss, ball, level), arms, tol=1e-10, throw=False)
    assert (found.status == glb.Status.CONVERGED).all()
    assert (found.upper - found.lower <= 1e-10 * (1.0 + found.upper.abs())).all()
