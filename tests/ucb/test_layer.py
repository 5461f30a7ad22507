"""The differentiable layer: the oracle's values, true gradients, and no fault let through."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from torchglb.domain import Ball
from torchglb.errors import InputError, SolverError
from torchglb.families import Bernoulli, Binomial, Gaussian, Poisson, QuasiBounded
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.optim.result import Status
from torchglb.ucb.program import SublevelProgram
from torchglb.ucb.solvers.conic import layer as module
from torchglb.ucb.solvers.conic.layer import UCBLayer, layer_support
from torchglb.ucb.solvers.conic.oracle import ConicResult, conic_minimum, conic_support

FAMILIES = [Bernoulli(), Binomial(3), Poisson(), Gaussian(0.7)]


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Data:
    """A program's tensors: n rows, K arms, the level beta2 above the minimum."""

    def __init__(self, family, generator, n=6, d=2, K=2, S=2.0, beta2=0.7, ridge=0.0, batch=()):
        def normal(*shape):
            return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

        X, arms, theta = normal(n, d), normal(K, d), normal(d, 1)
        self.X = 0.8 * X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
        self.arms = arms / torch.linalg.vector_norm(arms, dim=-1, keepdim=True)
        theta = 0.5 * S * theta / torch.linalg.vector_norm(theta, dim=-2, keepdim=True)
        self.r = family.sample((self.X @ theta)[..., 0], generator)
        self.w = 0.5 + torch.rand(*batch, n, generator=generator, dtype=torch.float64)
        self.family, self.ridge, self.radius = family, ridge, torch.tensor(S, dtype=torch.float64)
        self.level = conic_minimum(self.loss(), Ball(d, S)).loss + beta2

    def loss(self, **new: Tensor) -> NegativeLogLikelihood:
        X, r, w = (new.get(name, getattr(self, name)) for name in ("X", "r", "w"))
        return NegativeLogLikelihood(self.family, X, r, w, regularization=self.ridge)

    def program(self, **new: Tensor) -> SublevelProgram:
        domain = Ball(self.X.shape[-1], new.get("radius", self.radius))
        return SublevelProgram(self.loss(**new), domain, new.get("level", self.level))

    def oracle(self, **new: Tensor) -> ConicResult:
        # rewards that are moved for a difference may be outside of the support: nobody looks
        found = conic_support(self.program(**new), new.get("arms", self.arms), throw=False)
        assert (found.status == Status.CONVERGED).all()
        return found

    def variables(self) -> dict[str, Tensor]:
        names = ("X", "r", "w", "level", "arms", "radius")
        return {name: getattr(self, name).clone().requires_grad_() for name in names}


# ---- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize(
    ("n", "d", "S", "ridge"),
    [(0, 2, 1.5, 0.0), (7, 1, 2.0, 0.0), (20, 3, 0.6, 0.3), (40, 2, 5.0, 0)],
)
def test_values_are_the_oracles(family, n, d, S, ridge, generator):
    data = Data(family, generator, n=n, d=d, S=S, ridge=ridge)
    result = layer_support(data.program(), data.arms)
    exact = conic_support(data.program(), data.arms)
    assert torch.allclose(result.upper, exact.upper, atol=1e-9)
    assert torch.allclose(result.lower, exact.lower, atol=1e-9)
    assert torch.allclose(result.multiplier, exact.multiplier, rtol=1e-5, atol=1e-9)
    assert (result.gap <= 1e-6 * (1 + result.upper.abs())).all()
    assert (result.status == Status.CONVERGED).all()


@pytest.mark.parametrize("kind", ["logistic", "exponential", "square"])
@pytest.mark.parametrize("ridged", [False, True])
def test_program_is_dpp(kind, ridged, monkeypatch):
    monkeypatch.setattr(module, "CvxpyLayer", lambda problem, parameters, variables: problem)
    build = inspect.unwrap(module._compiled)  # not from its cache
    assert build(kind, 8, 2, ridged).is_dcp(dpp=True)


@pytest.mark.parametrize("shape", [(), (2,), (2, 1)])
def test_batch_shapes(shape, generator):
    data = Data(Gaussian(), generator, batch=shape)
    result = layer_support(data.program(), data.arms)
    assert result.upper.shape == result.status.shape == result.multiplier.shape == (*shape, 2)
    assert result.theta.shape == (*shape, 2, 2)
    assert torch.allclose(result.upper, data.oracle().upper, atol=1e-9)


def test_dtype_is_kept(generator):
    data = Data(Bernoulli(), generator)
    X = data.X.float().requires_grad_()
    layer = UCBLayer(Bernoulli(), Ball(2, 2.0), 8)
    result = layer(X, data.r.float(), None, torch.tensor(5.0), data.arms.float())
    for name in ("upper", "lower", "theta", "multiplier", "gap"):
        assert getattr(result, name).dtype == torch.float32
    (gradient,) = torch.autograd.grad(result.upper.sum(), X)
    assert gradient.dtype == torch.float32
    exact = NegativeLogLikelihood(Bernoulli(), X.detach().double(), data.r)
    level = torch.tensor(5.0, dtype=torch.float64)
    wide = conic_support(SublevelProgram(exact, Ball(2, 2.0), level), data.arms.float().double())
    assert (result.upper.double() >= wide.upper - 1e-12).all()
    assert torch.allclose(result.upper.double(), wide.upper, atol=1e-6)


def test_nothing_requires_grad_without_need(generator):
    data = Data(Bernoulli(), generator)
    assert not layer_support(data.program(), data.arms).upper.requires_grad
    with torch.no_grad():
        assert not layer_support(data.program(**data.variables()), data.arms).upper.requires_grad


# ---- gradients ------------------------------------------------------------------------------


BALLS = [
    pytest.param(family, ball, marks=pytest.mark.slow if i and ball else [])
    for i, family in enumerate(FAMILIES)
    for ball in (False, True)
]


@pytest.mark.parametrize(("family", "ball"), BALLS)
def test_gradients(family, ball, generator):
    """Of value, maximiser and multiplier, with the ball active or not, in every input.

    Along a random direction of each input, against differences of the oracle's certified answers.
    """
    data = Data(family, generator, n=5, K=12, S=9.0, beta2=0.3, ridge=0.4)
    if ball:  # so small that the minimiser is on the sphere
        data.radius = 0.8 * torch.linalg.vector_norm(conic_minimum(data.loss(), Ball(2, 9.0)).theta)
        data.level = conic_minimum(data.loss(), Ball(2, data.radius)).loss + 0.3
    exact = data.oracle()
    active = (exact.multiplier > 0.05) & ((exact.ball_multiplier > 0.05) == ball)
    assert active.any()
    data.arms = data.arms[active][:1]  # the first arm for which the loss is active, and the ball
    inputs = data.variables()
    result = layer_support(data.program(**inputs), inputs["arms"])
    tolerances = {"upper": 2e-5, "theta": 1e-3, "multiplier": 1e-3}
    cotangents, gradients = {}, {}
    for output in tolerances:
        found = getattr(result, output)
        cotangents[output] = torch.randn(found.shape, generator=generator, dtype=torch.float64)
        gradients[output] = torch.autograd.grad(
            found, list(inputs.values()), cotangents[output], retain_graph=True
        )
    h = 1e-5
    for i, (name, value) in enumerate(inputs.items()):
        direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        ahead, behind = (data.oracle(**{name: value.detach() + t * direction}) for t in (h, -h))
        for output, tolerance in tolerances.items():
            difference = (getattr(ahead, output) - getattr(behind, output)) / (2 * h)
            expected = (cotangents[output] * difference).sum()
            terms = gradients[output][i] * direction
            error = abs(terms.sum() - expected)
            assert error <= tolerance * (1 + terms.abs().sum()), (output, name)


def test_dense_mode_agrees(generator):
    data = Data(Bernoulli(), generator)
    gradients = []
    for mode in ("lsqr", "dense"):
        inputs = data.variables()
        result = layer_support(data.program(**inputs), inputs["arms"], mode=mode)
        gradients.append(torch.autograd.grad(result.upper.sum(), inputs["X"])[0])
    assert torch.allclose(*gradients, atol=1e-5)


def test_gradient_reaches_a_feature_extractor(generator):
    data = Data(Bernoulli(), generator, n=8)
    torch.manual_seed(0)
    head = torch.nn.Linear(2, 2, bias=False).double()
    layer = UCBLayer(Bernoulli(), Ball(2, 2.0), capacity=8)
    level = torch.tensor(6.0, dtype=torch.float64)

    def bound() -> Tensor:
        return layer(head(data.X), data.r, data.w, level, head(data.arms)).upper.sum()

    value = bound()
    value.backward()
    slope = head.weight.grad.square().sum()
    with torch.no_grad():
        head.weight -= 1e-4 * head.weight.grad
        assert value - bound() == pytest.approx(float(1e-4 * slope), rel=1e-2)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_padding_receives_exactly_zero_gradient(family, generator):
    data = Data(family, generator, n=7)
    data.w[[2, 5]] = 0.0
    data.level = conic_minimum(data.loss(), Ball(2, 2.0)).loss + 0.7
    inputs = data.variables()
    layer = UCBLayer(family, Ball(2, 2.0), capacity=16)
    result = layer(inputs["X"], inputs["r"], inputs["w"], inputs["level"], inputs["arms"])
    kept = data.w > 0
    few = {name: inputs[name][kept].detach().requires_grad_() for name in ("X", "r", "w")}
    short = UCBLayer(family, Ball(2, 2.0), capacity=5)(
        few["X"], few["r"], few["w"], data.level, data.arms
    )
    assert torch.allclose(result.upper, short.upper, atol=1e-12)
    for output in ("upper", "theta"):
        cotangent = torch.randn(getattr(result, output).shape, generator=generator).double()
        names = ["X", "r", "w"]
        padded, plain = (
            torch.autograd.grad(
                getattr(solved, output),
                [given[name] for name in names],
                cotangent,
                retain_graph=True,
            )
            for solved, given in ((result, inputs), (short, few))
        )
        for with_padding, without in zip(padded, plain, strict=True):
            assert (with_padding[~kept] == 0).all()
            assert torch.allclose(with_padding[kept], without, rtol=1e-3, atol=1e-4)


def test_padding_may_hold_anything(generator):
    data = Data(Poisson(), generator, n=5)
    expected = layer_support(data.program(), data.arms).upper
    X = torch.cat([data.X, torch.full((2, 2), torch.nan)]).requires_grad_()
    r, w = (torch.cat([t, torch.tensor([torch.inf, 0.0])]) for t in (data.r, data.w))
    w = torch.cat([data.w, torch.zeros(2)])
    result = layer_support(data.program(X=X, r=r, w=w), data.arms)
    assert torch.allclose(result.upper, expected, atol=1e-9)
    (gradient,) = torch.autograd.grad(result.upper.sum(), X)
    assert torch.isfinite(gradient).all()
    assert (gradient[5:] == 0).all()


def test_second_derivatives_are_refused(generator):
    data = Data(Bernoulli(), generator)
    inputs = data.variables()
    result = layer_support(data.program(**inputs), inputs["arms"])
    first = torch.autograd.grad(result.upper.sum(), list(inputs.values()), create_graph=True)
    for gradient, value in zip(first, inputs.values(), strict=True):
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(gradient.sum(), value, retain_graph=True)


# ---- failures -------------------------------------------------------------------------------


def test_failures_stay_in_their_element(generator):
    data = Data(Bernoulli(), generator, batch=(3,))
    data.level[2] -= 10.0  # below the minimum
    X = data.X.clone()
    X[1, 0, 0] = torch.nan
    X.requires_grad_()
    result = layer_support(data.program(X=X), data.arms, throw=False)
    expected = [Status.CONVERGED, Status.NONFINITE, Status.INFEASIBLE]
    assert result.status.tolist() == [[s, s] for s in expected]
    (gradient,) = torch.autograd.grad(result.upper[0].sum(), X)
    assert torch.isnan(result.upper[1]).all()
    assert (result.upper[2] == -torch.inf).all()
    assert torch.isnan(result.theta[1:]).all()
    sound = data.X[0].clone().requires_grad_()
    loss = NegativeLogLikelihood(Bernoulli(), sound, data.r[0], data.w[0])
    alone = layer_support(SublevelProgram(loss, Ball(2, 2.0), data.level[0]), data.arms[0])
    assert torch.equal(result.upper[0], alone.upper)
    assert torch.equal(gradient[0], torch.autograd.grad(alone.upper.sum(), sound)[0])
    assert (gradient[1:] == 0).all()
    with pytest.raises(SolverError, match=r"NONFINITE.*\(1, 0\).*INFEASIBLE.*\(2, 0\)"):
        layer_support(data.program(X=X), data.arms)


def test_bad_arm_does_not_spoil_its_neighbours(generator):
    data = Data(Gaussian(), generator, K=3)
    arms = data.arms.clone()
    arms[1] = torch.nan
    arms.requires_grad_()
    result = layer_support(data.program(), arms, throw=False)
    assert result.status.tolist() == [0, Status.NONFINITE, 0]
    (gradient,) = torch.autograd.grad(result.upper[[0, 2]].sum(), arms)
    assert torch.allclose(gradient[[0, 2]], result.theta[[0, 2]].detach(), atol=1e-5)
    with pytest.raises(InputError, match="arms"):
        layer_support(data.program(), arms)


def test_unconverged_solve_is_no_answer(generator):
    """The package underneath returns a point of any norm after two iterations, and a warning."""
    data = Data(Bernoulli(), generator, n=30, d=3, S=9.0)
    result = layer_support(data.program(), data.arms, max_steps=2, fallbacks=(), throw=False)
    assert (result.status == Status.MAX_STEPS).all()
    assert torch.isnan(result.upper).all()
    assert torch.isnan(result.theta).all()
    with pytest.raises(SolverError, match="MAX_STEPS"):
        layer_support(data.program(), data.arms, max_steps=2, fallbacks=())


@pytest.mark.parametrize("wrong", ["infeasible", "suboptimal", "sideways", "nan", "raises"])
def test_wrong_answers_from_below_are_caught(wrong, generator, monkeypatch):
    data = Data(Bernoulli(), generator, S=1.0)
    good = module._compiled("logistic", 8, 2, False)

    def bad(*parameters, solver_args):
        v, dual = good(*parameters, solver_args=solver_args)
        if wrong == "raises":
            raise RuntimeError("Solver failed")
        beside = torch.stack([-parameters[0][1], parameters[0][0]])  # orthogonal to the arm
        wrongs = {
            "infeasible": 1.01 * v,
            "suboptimal": 0.99 * v,
            "sideways": v + 0.1 * beside,
            "nan": torch.nan * v,
        }
        return wrongs[wrong], dual

    monkeypatch.setattr(module, "_compiled", lambda *key: bad)
    result = layer_support(data.program(), data.arms, throw=False)
    assert (result.status == Status.INACCURATE).all()
    assert torch.isnan(result.upper).all()


# ---- arguments ------------------------------------------------------------------------------


def test_too_large_a_history_is_refused():
    with pytest.raises(InputError, match=r"at most 1024 rows at dimension 2.*got 1025"):
        UCBLayer(Bernoulli(), Ball(2, 1.0), capacity=1025)
    with pytest.raises(InputError, match=r"at most 409 rows at dimension 10.*native"):
        UCBLayer(Bernoulli(), Ball(10, 1.0), capacity=410)
    loss = NegativeLogLikelihood(Bernoulli(), torch.zeros(410, 10), torch.zeros(410))
    program = SublevelProgram(loss, Ball(10, 1.0), torch.tensor(1.0))
    with pytest.raises(InputError, match="409 rows"):
        layer_support(program, torch.ones(1, 10))


def test_bad_arguments_are_refused():
    ball, ones = Ball(2, 1.0), torch.ones(5)
    with pytest.raises(InputError, match="Bernoulli, Binomial, Poisson, Gaussian"):
        UCBLayer(QuasiBounded("probit"), ball, 4)
    with pytest.raises(InputError, match="capacity"):
        UCBLayer(Gaussian(), ball, 0)
    with pytest.raises(InputError, match="mode"):
        UCBLayer(Gaussian(), ball, 4, mode="magic")
    with pytest.raises(InputError, match="solver"):
        UCBLayer(Gaussian(), ball, 4, solver="OSQP")
    layer = UCBLayer(Gaussian(), ball, 4)
    with pytest.raises(InputError, match="X: expected at most 4 rows"):
        layer(torch.ones(5, 2), ones, ones, torch.tensor(1.0), torch.ones(1, 2))
    assert not list(layer.parameters())
    assert not layer.state_dict()


def test_second_order_cone_closed_form():
    """A disc of radius sqrt(2 (B + 1/2)) around (1, 0): value and derivatives by hand."""
    level = torch.tensor(-0.375, dtype=torch.float64, requires_grad=True)
    r = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    X, arms = torch.eye(2).double(), torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    result = UCBLayer(Gaussian(), Ball(2, 2.0), 2)(X, r, None, level, arms)
    assert float(result.upper.detach()) == pytest.approx(0.6 + 0.5, abs=1e-9)
    slope, shift = torch.autograd.grad(result.upper.sum(), (level, r))
    assert float(slope) == pytest.approx(2.0, rel=1e-5)
    # the disc is around r and its radius depends on r: B + |r|^2/2 = radius^2/2
    expected = arms[0] + 2.0 * torch.tensor([1.0, 0.0]).double()
    assert torch.allclose(shift, expected, atol=1e-4)
    assert math.isclose(float(result.multiplier.detach()), 2.0, rel_tol=1e-6)
