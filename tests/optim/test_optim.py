"""The solvers on convex functions that have nothing to do with GLMs."""

import math

import pytest
import torch

import torchglb as glb
from torchglb.optim import (
    Derivatives,
    SolveResult,
    Status,
    frank_wolfe_gap,
    lbfgs,
    newton,
    raise_unless_converged,
)
from torchglb.optim.loop import Progress, iterate

DTYPES = [torch.float32, torch.float64]
SOLVERS = ["newton", "lbfgs"]


class Quadratic:
    """``(theta - c)' A (theta - c) / 2`` with its minimum over the ball known by bisection."""

    def __init__(self, A: torch.Tensor, c: torch.Tensor) -> None:
        self.A, self.c = A, c

    def __call__(self, theta):
        away = theta - self.c
        gradient = (self.A @ away[..., None])[..., 0]
        return (
            0.5 * (away * gradient).sum(-1),
            gradient,
            self.A.expand(*theta.shape, theta.shape[-1]),
        )

    def __getitem__(self, index):
        return Quadratic(self.A[index], self.c[index])


class LogSumExp:
    """``log sum_k exp(<a_k, theta> + b_k)``: smooth, convex, without curvature far out."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __call__(self, theta):
        z = (self.a @ theta[..., None])[..., 0] + self.b
        p = torch.softmax(z, dim=-1)
        gradient = (p[..., None, :] @ self.a)[..., 0, :]
        second = (self.a.mT * p[..., None, :]) @ self.a
        hessian = second - gradient[..., :, None] * gradient[..., None, :]
        return torch.logsumexp(z, dim=-1), gradient, hessian

    def __getitem__(self, index):
        return LogSumExp(self.a[index], self.b[index])


class Steep:
    """``sum_i cosh(s_i theta_i) - <v, theta>``: full Newton steps overshoot, so segments must shrink."""

    def __init__(self, s: torch.Tensor, v: torch.Tensor) -> None:
        self.s, self.v = s, v

    def __call__(self, theta):
        z = self.s * theta
        value = torch.cosh(z).sum(-1) - (self.v * theta).sum(-1)
        gradient = self.s * torch.sinh(z) - self.v
        return value, gradient, torch.diag_embed(self.s**2 * torch.cosh(z))

    def __getitem__(self, index):
        return Steep(self.s[index], self.v[index])


def make(name: str, batch: tuple[int, ...], d: int, generator, dtype=torch.float64):
    def normal(*shape):
        return torch.randn((*batch, *shape), generator=generator, dtype=torch.float64).to(dtype)

    if name == "quadratic":
        root = normal(d, d)
        return Quadratic(root @ root.mT + 0.1 * torch.eye(d, dtype=dtype), 2.0 * normal(d))
    if name == "flat":
        root = normal(d, 1)
        return Quadratic(root @ root.mT, 2.0 * normal(d))
    if name == "logsumexp":
        return LogSumExp(normal(3 * d, d), normal(3 * d))
    return Steep(1.0 + 5.0 * normal(d).abs(), 50.0 * normal(d))


FUNCTIONS = ["quadratic", "flat", "logsumexp", "steep"]


def solve(
    solver: str, function, start, radius, tol=None, **options
) -> tuple[SolveResult, Derivatives]:
    if tol is None:
        tol = 1e-9 if start.dtype == torch.float64 else 1e-4
    if solver != "lbfgs":
        return newton(lambda t: Derivatives(*function(t)), start, radius, tol=tol, **options)
    return lbfgs(lambda t: function(t)[:2], start, radius, tol=tol, **options)


def zeros_and_radii(batch, d, generator, dtype=torch.float64):
    radius = 0.1 + 3.0 * torch.rand(batch, generator=generator, dtype=torch.float64)
    return torch.zeros((*batch, d), dtype=dtype), radius.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("d", [1, 2, 7, 30])
def test_reaches_the_minimum_with_a_certificate(solver, name, d, dtype, generator):
    batch = (6,)
    function = make(name, batch, d, generator, dtype)
    start, radius = zeros_and_radii(batch, d, generator, dtype)
    result, at = solve(solver, function, start, radius)
    assert (result.status == Status.CONVERGED).all(), result.status
    value, gradient, hessian = function(result.point)
    tol = 1e-9 if dtype == torch.float64 else 1e-4
    assert (result.gap <= tol * (1 + value.abs())).all()
    assert result.point.dtype == result.value.dtype == result.gap.dtype == dtype
    torch.testing.assert_close(result.value, value)
    torch.testing.assert_close(at.gradient, gradient)
    if solver == "newton" or at.hessian.ndim > gradient.ndim:
        torch.testing.assert_close(at.hessian, hessian)
    norm = torch.linalg.vector_norm(result.point, dim=-1)
    assert (norm <= radius * (1 + 8 * torch.finfo(dtype).eps)).all()
    # the gap bounds how much lower any other point of the ball can be
    others = torch.randn((500, *batch, d), generator=generator, dtype=torch.float64).to(dtype)
    others = glb.Ball(d, radius).project(others)
    rounding = 64 * torch.finfo(dtype).eps * (1 + value.abs())
    lowest = function(others)[0].amin(0)
    assert (value - result.gap <= lowest + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gap_is_the_largest_linear_decrease(dtype, generator):
    theta = torch.randn((50, 4), generator=generator, dtype=torch.float64)
    gradient = torch.randn((50, 4), generator=generator, dtype=torch.float64)
    radius = theta.norm(dim=-1) * (1 + torch.rand(50, generator=generator, dtype=torch.float64))
    radius[:10] = theta[:10].norm(dim=-1)  # on the sphere
    plain = (gradient * theta).sum(-1) + radius * gradient.norm(dim=-1)
    got = frank_wolfe_gap(*(t.to(dtype) for t in (theta, gradient, radius)))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got.double(), plain, rtol=tolerance, atol=tolerance)
    assert frank_wolfe_gap(theta, torch.zeros_like(theta), radius).abs().max() == 0


def test_gap_keeps_precision_on_the_sphere():
    """``<g, theta> + S|g|`` would cancel to rounding; the formula used does not."""
    angle = torch.tensor([1e-3, 1e-6, 1e-9], dtype=torch.float64)
    gradient = torch.tensor([1e6, 0.0], dtype=torch.float64).expand(3, 2)
    theta = -2.0 * torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1)
    exact = 2e6 * 2.0 * torch.sin(angle / 2) ** 2
    got = frank_wolfe_gap(theta, gradient, torch.full((3,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(got[:2], exact[:2], rtol=1e-3, atol=1e-9)
    assert got[2] < 1e-8


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_companions_do_not_matter(solver, name, generator):
    """Splitting and permuting a batch changes nothing, neither answers nor statuses nor steps."""
    batch, d = (12,), 5
    function = make(name, batch, d, generator)
    start, radius = zeros_and_radii(batch, d, generator)
    whole, _ = solve(solver, function, start, radius)
    order = torch.randperm(12, generator=generator)
    permuted, _ = solve(solver, function[order], start[order], radius[order])
    halves = [
        solve(solver, function[part], start[part], radius[part])[0]
        for part in (slice(0, 5), slice(5, 12))
    ]
    singles = [solve(solver, function[i], start[i], radius[i])[0] for i in range(12)]
    for field in ("point", "value", "gap", "status", "num_steps"):
        expected = getattr(whole, field)
        assert_same(getattr(permuted, field), expected[order])
        assert_same(torch.cat([getattr(half, field) for half in halves]), expected)
        assert_same(torch.stack([getattr(one, field) for one in singles]), expected)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of batched matrix products; integers exactly."""
    if got.dtype == torch.int64:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_poisoned_element_harms_no_other(solver, dtype, poison, generator):
    batch, d = (5,), 3
    function = make("logsumexp", batch, d, generator, dtype)
    start, radius = zeros_and_radii(batch, d, generator, dtype)
    clean, _ = solve(solver, function, start, radius)
    function.b[2, 0] = poison
    if poison == -math.inf:
        function.b[2] = poison  # every term vanishes
    poisoned, _ = solve(solver, function, start, radius)
    assert poisoned.status.tolist() == [0, 0, int(Status.NONFINITE), 0, 0]
    others = [0, 1, 3, 4]
    torch.testing.assert_close(poisoned.point[others], clean.point[others])
    assert torch.equal(poisoned.num_steps[others], clean.num_steps[others])
    assert poisoned.num_steps[2] == 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_infinite_value_on_the_way_is_stepped_back_from(solver):
    """``theta - log(1 - theta)`` is infinite beyond 1: a segment that leaves its domain shrinks."""

    def barrier(theta):
        room = 1.0 - theta[..., 0]
        value = torch.where(
            room > 0, -2.0 * theta[..., 0] - torch.log(room.clamp_min(1e-300)), math.inf
        )
        gradient = (-2.0 + 1.0 / room)[..., None]
        return value, gradient, (1.0 / room**2)[..., None, None]

    start = torch.full((2, 1), -3.0, dtype=torch.float64)
    radius = torch.full((2,), 4.0, dtype=torch.float64)
    result, _ = solve(solver, barrier, start, radius)
    assert (result.status == Status.CONVERGED).all()
    torch.testing.assert_close(result.point, torch.full_like(start, 0.5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_step_limit(solver, generator):
    function = make("steep", (4,), 3, generator)
    start, radius = zeros_and_radii((4,), 3, generator)
    function.v[1] = 0.0  # its minimum is the start
    result, _ = solve(solver, function, start, radius, max_steps=2)
    assert result.status.tolist() == [1, 0, 1, 1]
    assert result.num_steps.tolist() == [2, 0, 2, 2]
    unmoved, _ = solve(solver, function, start, radius, max_steps=0)
    assert unmoved.status.tolist() == [1, 0, 1, 1]
    assert torch.equal(unmoved.point, start)


@pytest.mark.parametrize("solver", SOLVERS)
def test_values_never_rise(solver, generator):
    function = make("steep", (), 4, generator)
    start, radius = torch.zeros(4, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    values = [
        float(solve(solver, function, start, radius, max_steps=k)[0].value) for k in range(15)
    ]
    assert all(b <= a + 1e-12 * (1 + abs(a)) for a, b in zip(values, values[1:], strict=False))
    assert values[-1] < values[0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_impossible_tolerance_is_reported_not_hidden(solver, generator):
    function = make("logsumexp", (3,), 4, generator)
    start, radius = zeros_and_radii((3,), 4, generator)
    result, _ = solve(solver, function, start, radius + 5.0, tol=1e-30)
    assert set(result.status.tolist()) <= {int(Status.INACCURATE), int(Status.CONVERGED)}
    assert (result.status == Status.INACCURATE).any()
    assert (result.gap <= 1e-6).all()  # and it still is as good as the arithmetic allows


@pytest.mark.parametrize("solver", SOLVERS)
def test_inputs_and_graphs_are_left_alone(solver, generator):
    function = make("quadratic", (2,), 3, generator)
    function.c.requires_grad_()
    start, radius = zeros_and_radii((2,), 3, generator)
    before = start.clone(), radius.clone()
    result, _ = solve(solver, function, start, radius)
    assert torch.equal(start, before[0])
    assert torch.equal(radius, before[1])
    assert not result.point.requires_grad


# ---- the loop -------------------------------------------------------------------------------------


def test_loop_freezes_finished_elements():
    """Each element counts down from its own number; later steps must not touch it."""
    from typing import NamedTuple

    class State(NamedTuple):
        left: torch.Tensor
        touched: torch.Tensor

    def report(state):
        return Progress(
            state.left <= 0, torch.zeros_like(state.left, dtype=torch.bool), state.left < 100
        )

    def step(state):
        new = State(state.left - 1, state.touched + 1)
        return new, report(new)

    start = State(torch.tensor([3.0, 0.0, 5.0, 1.0, 200.0]), torch.zeros(5))
    state, status, num_steps = iterate(step, start, report(start), 4)
    assert state.touched.tolist() == [3.0, 0.0, 4.0, 1.0, 0.0]
    assert num_steps.tolist() == [3, 0, 4, 1, 0]
    expected = [
        Status.CONVERGED,
        Status.CONVERGED,
        Status.MAX_STEPS,
        Status.CONVERGED,
        Status.NONFINITE,
    ]
    assert status.tolist() == [int(s) for s in expected]


def test_every_status_has_a_sentence():
    assert {status.name for status in Status} == {
        "CONVERGED",
        "MAX_STEPS",
        "NONFINITE",
        "INFEASIBLE",
        "INACCURATE",
    }
    assert all(len(status.sentence) > 10 for status in Status)


def test_failures_are_named():
    raise_unless_converged(torch.zeros(3, dtype=torch.int64), "solve")
    raise_unless_converged(torch.tensor(0), "solve")
    with pytest.raises(glb.SolverError, match="the problem") as single:
        raise_unless_converged(torch.tensor(1), "solve")
    assert "solve: MAX_STEPS (the step limit" in str(single.value)
    status = torch.tensor([[0, 2], [4, 0]])
    with pytest.raises(glb.SolverError) as several:
        raise_unless_converged(status, "solve")
    message = str(several.value)
    assert "NONFINITE" in message
    assert "(0, 1)" in message
    assert "INACCURATE" in message
    assert "(1, 0)" in message
    assert "throw=False" in message
    with pytest.raises(glb.SolverError, match=r"\.\.\."):
        raise_unless_converged(torch.ones(50, dtype=torch.int64), "solve")
