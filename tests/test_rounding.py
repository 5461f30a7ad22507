"""One rounding policy: upper never below the truth, lower never above, INFEASIBLE only if proven.

The truth about float32 rows is a solve of the same numbers in float64, whose own bounds are ten
digits sharper; that about float64 rows is worked out in fifty digits.
"""

import functools

import mpmath
import pytest
import torch
from programs import ExactLoss, exact_value, random_program

import torchglb as glb
from torchglb.optim import Status
from torchglb.rounding import round_up
from torchglb.ucb.solvers import native

DOUBLE = torch.float64


def make(n, d, S, family, beta2, seed, repeats=1, weighted=False):
    """A program of float32 numbers, some arms, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.nn.functional.normalize(torch.randn(n, d, generator=generator).double(), dim=-1)
    X = 0.99 * X * torch.rand(n, 1, generator=generator).double() ** 0.5
    truth = torch.nn.functional.normalize(torch.randn(d, generator=generator).double(), dim=0)
    r = family.sample(0.7 * S * X @ truth, generator)
    X, r = X.repeat(repeats, 1).float(), r.repeat(repeats).float()
    w = torch.rand(len(r), generator=generator).float() if weighted else None
    arms = torch.nn.functional.normalize(torch.randn(6, d, generator=generator), dim=-1)
    wide = glb.NegativeLogLikelihood(
        family, X.double(), r.double(), None if w is None else w.double()
    )
    domain = glb.Ball(d, S)
    fit = glb.constrained_mle(family, glb.Rows(wide.X, wide.r, wide.w), domain, throw=False)
    level = (fit.loss + beta2).float()
    narrow = glb.SublevelProgram(glb.NegativeLogLikelihood(family, X, r, w), domain, level)
    return narrow, arms, glb.SublevelProgram(wide, domain, level.double())


CASES = [
    pytest.param(
        dict(n=n, d=d, S=S, family=family, beta2=beta2, seed=n + d), id=f"{family}-{n}-{d}"
    )
    for family, S in ((glb.Bernoulli(), 5.0), (glb.Gaussian(0.5), 2.0), (glb.Poisson(), 2.0))
    for n, d, beta2 in (
        (20, 2, 1.0),
        (300, 3, 4.0),
        (3000, 2, 3.0),
        (3000, 8, 10.0),
        (40_000, 3, 6.0),
    )
]


@functools.lru_cache(maxsize=1)
def solved(**arguments):
    narrow, arms, wide = make(**arguments)
    return narrow, arms, glb.support(wide, arms.double(), tol=1e-12, throw=False)


def check(few, many, S):
    assert (few.upper.double() >= many.lower).all()
    assert (few.lower.double() <= many.upper).all()
    assert (few.status == Status.CONVERGED).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("repeats", [1, 25])
def test_float32_encloses_the_truth(case, repeats):
    """On a CPU float32 is a way to store rows: bounds are as sharp as float32 can state them."""
    if case["n"] > 3000 and repeats > 1:
        case = case | {"n": 1000}
    narrow, arms, many = solved(**case, repeats=repeats)
    few = glb.support(narrow, arms)
    check(few, many, case["S"])
    assert float((few.upper.double() - few.lower.double()).max()) <= 2e-3 * case["S"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("repeats", [1, 25])
@pytest.mark.parametrize("weighted", [False, True])
def test_float32_arithmetic_encloses_the_truth(case, repeats, weighted):
    """The arithmetic of a device, where float32 is computed with: looser, never wrong."""
    if case["n"] > 3000 and repeats > 1:
        case = case | {"n": 1000}
    narrow, arms, many = solved(**case, repeats=repeats, weighted=weighted)
    start = torch.full((case["d"],), torch.nan)
    few = glb.SupportResult(*native._solve(narrow, start, arms, 1e-3, 100))
    assert (few.upper.double() >= many.lower).all()
    assert (few.lower.double() <= many.upper).all()
    assert (few.status != Status.INFEASIBLE).all()


def test_float64_encloses_the_truth_among_many_equal_rows():
    """Roundings of equal terms agree: the worst case for a sum. The truth has fifty digits."""
    for seed in (0, 3, 27, 50):
        case = random_program(seed, max_n=20, max_d=3)
        loss, copies = case.program.likelihood, 3000
        rows = (
            None if t is None else t.repeat(copies, *([1] * (t.ndim - 1)))
            for t in (loss.X, loss.r, loss.w)
        )
        many = glb.NegativeLogLikelihood(loss.family, *rows)
        few = glb.NegativeLogLikelihood(loss.family, loss.X, loss.r, loss.w)
        fit = glb.constrained_mle(
            loss.family, glb.Rows(loss.X, loss.r, loss.w), case.program.domain, throw=False
        )
        level = fit.loss + 0.01
        result = glb.support(
            glb.SublevelProgram(many, case.program.domain, copies * level), case.arms, throw=False
        )
        # the loss of the copies is that many times the loss of one, and so is the level
        for k, x in enumerate(case.arms):
            with mpmath.workdps(50):
                share = mpmath.mpf(float(copies * level)) / copies
                program = glb.SublevelProgram(few, case.program.domain, level)
                exact = _value(program, share, x, result.theta[k])
                if exact is not None:
                    assert mpmath.mpf(float(result.upper[k])) >= exact
                    assert mpmath.mpf(float(result.lower[k])) <= exact


def _value(program, level, x, theta):
    """``h(x)`` for a level of fifty digits."""
    init = ExactLoss.__init__

    def at_level(self, program):
        init(self, program)
        self.level = level

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactLoss, "__init__", at_level)
        return exact_value(program, x, theta)


# ---- statuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("n", [50, 5000])
def test_infeasible_is_proven(dtype, n):
    """Levels about the minimum, from a centre that is not quite it: no set is called empty that is not."""
    family, domain = glb.Gaussian(1.0), glb.Ball(2, 3.0)
    eps, empty = torch.finfo(dtype).eps, 0
    for seed in range(8 if n < 1000 else 1):
        generator = torch.Generator().manual_seed(seed)
        X = torch.nn.functional.normalize(
            torch.randn(n, 2, generator=generator).double(), dim=-1
        ).to(dtype)
        r = (30 + torch.randn(n, generator=generator)).to(dtype)
        loss = glb.NegativeLogLikelihood(family, X, r)
        wide = glb.NegativeLogLikelihood(family, X.double(), r.double())
        fit = glb.constrained_mle(family, glb.Rows(wide.X, wide.r), domain, tol=1e-15, throw=False)
        with mpmath.workdps(40):
            reached = _exact_loss(wide, fit)  # at least the minimum
        for steps in (-(4.0**10), -1e3, -16, -4, -1, 0, 1, 4, 16):
            level = (fit.loss * (1 - steps * eps)).to(dtype)  # the minimum is negative
            program = glb.SublevelProgram(loss, domain, level)
            for center in (None, fit.theta.to(dtype) * (1 - 4 * eps)):
                arms = torch.eye(2, dtype=dtype)
                start = torch.full((2,), torch.nan, dtype=dtype) if center is None else center
                found = [
                    glb.support(program, arms, center=center, throw=False).status,
                    native._solve(program, start, arms, 1e-3, 50)[-1],
                ]
                for status in found:
                    if bool((status == Status.INFEASIBLE).any()):
                        empty += 1
                        assert mpmath.mpf(float(level)) < reached, (seed, steps)
    assert empty  # far below the minimum it is seen


def _exact_loss(loss, fit):
    """The loss of an estimate in forty digits."""
    theta = [mpmath.mpf(v) for v in fit.theta.tolist()]
    total = mpmath.mpf(0)
    for x, r in zip(loss.X.tolist(), loss.r.tolist(), strict=True):
        z = mpmath.fdot([mpmath.mpf(v) for v in x], theta)
        total += z * z / 2 - mpmath.mpf(r) * z
    return total


@pytest.mark.parametrize("n", [1500, 3000, 20_000])
@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Poisson()])
def test_float32_intervals_do_not_raise(n, family):
    """From some thousand rows on float32 cannot reach its tolerance, and its bounds are still valid."""
    generator = torch.Generator().manual_seed(n)
    sequence = glb.ConfidenceSequence(family, glb.Ball(3, 3.0), delta=0.05, dtype=torch.float32)
    X = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1) * 0.99
    r = family.sample(X @ torch.tensor([1.5, -1.0, 0.5]), generator)
    sequence.update(X, r)
    arms = torch.nn.functional.normalize(torch.randn(10, 3, generator=generator), dim=-1)
    interval = sequence.current().interval(arms)
    assert (interval.lower <= interval.upper).all()
    assert torch.isfinite(interval.width).all()
    wide = glb.ConfidenceSequence(family, glb.Ball(3, 3.0), delta=0.05)
    wide.update(X.double(), r.double())
    truth = wide.current().interval(arms.double())
    assert float((interval.width.double() - truth.width).abs().max()) <= 0.05 * float(
        truth.width.max()
    )


@pytest.mark.parametrize("n", [3000, 12_000])
def test_float32_heads_choose(n):
    generator = torch.Generator().manual_seed(n)
    network = torch.nn.Linear(5, 4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    head = glb.GLMHead(network, glb.Bernoulli(), glb.Ball(4, 4.0), dtype=torch.float32)
    head.update(
        torch.randn(n, 5, generator=generator), (torch.rand(n, generator=generator) < 0.3).float()
    )
    assert head.select(torch.randn(20, 5, generator=generator)).shape == ()
    assert torch.isfinite(head.confidence(torch.randn(4, 5, generator=generator)).width).all()


def test_rounding_up_leaves_no_number_below_what_it_was():
    edge = [0.1, -0.1, 1e300, -1e300, 3.5e38, -3.5e38, 1e-60, -1e-60, torch.inf, -torch.inf, 0.0]
    value = torch.tensor(edge, dtype=DOUBLE)
    found = round_up(value, torch.float32)
    assert found.dtype == torch.float32
    assert bool((found.double() >= value).all())
    fits = value.abs() < 3.4e38
    assert bool((found.double() - value)[fits].le(2e-7 * value.abs()[fits] + 2e-45).all())
    assert float(found[3]) == torch.finfo(torch.float32).min  # and the lowest only if it is less
    assert float(found[-2]) == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Binomial(5), glb.Poisson()], ids=repr)
def test_a_refitted_program_encloses_its_level(family, dtype, generator):
    """``min L + beta^2`` is as uncertain as the loss that was computed: both bounds pay for it."""
    d, S = 3, 2.0
    for _ in range(6):
        X = torch.nn.functional.normalize(torch.randn(600, d, generator=generator), dim=-1)
        X = (X * (1 - 1e-6)).to(dtype)
        r = family.sample(X @ torch.tensor([1.0, -0.5, 0.5], dtype=dtype), generator).to(dtype)
        program = glb.ucb.RefitProgram(family, glb.Ball(d, S), dtype=dtype)
        program.append(X, r)
        arms = torch.nn.functional.normalize(torch.randn(8, d, generator=generator), dim=-1)
        arms = 0.999 * arms.to(dtype)
        loss = glb.NegativeLogLikelihood(family, X.double(), r.double())
        fit = glb.constrained_mle(family, glb.Rows(X.double(), r.double()), glb.Ball(d, S))
        whole = program.argmax(arms, radius=torch.inf)
        torch.testing.assert_close(whole.lower, S * torch.linalg.vector_norm(arms, dim=-1))
        for radius in (0.002, 0.05, 2.0, 10.0):
            choice = program.argmax(arms, radius=radius, throw=False)
            hidden = bool(choice.lower.isneginf().all())
            assert int(choice.status) == (glb.Status.INACCURATE if hidden else glb.Status.CONVERGED)
            exact = glb.SublevelProgram(loss, glb.Ball(d, S), fit.loss + radius)
            truth = native.native_support(exact, arms.double(), tol=1e-10)
            assert bool((choice.upper.double() >= truth.lower - 1e-8).all())
            assert bool((choice.lower.double() <= truth.upper + 1e-8).all())
            # an estimate of seven digits leaves a gap that small levels drown in
            if dtype == DOUBLE or radius >= 2.0:
                wide = choice.upper - choice.lower
                assert bool((wide <= 1e-2 * (1.0 + choice.upper.abs())).all())
            assert float(program.program(radius=radius).level) >= float(fit.loss - fit.gap) + radius


@pytest.mark.parametrize("S", [0.3, 0.7, 4.0])
def test_an_estimate_on_the_sphere_gives_no_level_below_the_minimum(S, generator):
    """In float32 it may end outside the ball, where the loss is lower than anywhere inside."""
    family, ball = glb.Gaussian(0.3), glb.Ball(3, S)
    X = torch.nn.functional.normalize(torch.randn(40, 90, 3, generator=generator), dim=-1) * 0.99
    r = (X @ torch.tensor([3.0, 2.0, 1.0])) * S
    program = glb.ucb.RefitProgram(family, ball, (40,), dtype=torch.float32)
    program.append(X, r)
    rows = glb.Rows(X.double(), r.double())
    fit = glb.constrained_mle(family, rows, ball)
    found = program.minimum()
    assert bool((torch.linalg.vector_norm(found.theta.double(), dim=-1) <= S).all())
    assert bool((found.loss.double() >= fit.loss - fit.gap).all())
    assert bool((found.lower_bound.double() <= fit.loss).all())
    arms = -X[:, :4]
    choice = program.argmax(arms, radius=1e-5, throw=False)  # less than float32 tells
    least = fit.loss - fit.gap + 1e-5
    exact = glb.SublevelProgram(glb.NegativeLogLikelihood(family, *rows), ball, least)
    truth = native.native_support(exact, arms.double(), tol=1e-10, throw=False)
    assert bool((choice.upper.double() >= truth.lower).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("d", [1, 3, 6])
def test_a_hessian_in_blocks_loses_no_more_than_it_says(d, dtype):
    """Of many equal rows, whose sum a plain product of matrices takes one after the other."""
    n, family = 40_000, glb.Bernoulli()
    x = torch.linspace(0.3, 0.5, d).to(dtype)
    rows = x.expand(n, d).contiguous()
    for X in (rows, rows.mT.contiguous().mT):
        loss, theta = glb.NegativeLogLikelihood(family, X, torch.zeros(n, dtype=dtype)), 0.3 * x
        of_row = family.curvature((X[:1] @ theta)[0]).double()
        exact = n * of_row * torch.outer(x.double(), x.double())
        found = [
            loss.hessian(theta),
            loss.expand(theta, in_blocks=True).hessian,
            loss.expand_with_errors(theta, in_blocks=True)[0].hessian,
            loss.expand(theta.expand(2, d), in_blocks=True).hessian[1],
        ]
        for hessian in found:
            lost = torch.linalg.matrix_norm(hessian.double() - exact, ord=2) / exact.trace()
            assert float(lost) <= loss.lost_in_hessian()
