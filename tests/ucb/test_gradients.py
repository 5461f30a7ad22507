"""Derivatives of the optimistic program: each activity case, each input, each transform."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vmap

import torchglb as glb
from torchglb.optim import Status
from torchglb.ucb import native_support
from torchglb.ucb.solvers.conic.layer import UCBLayer

FAMILIES = {
    "bernoulli": glb.Bernoulli(),
    "gaussian": glb.Gaussian(0.8),
    "poisson": glb.Poisson(),
}
#: forward mode asks torch for decompositions that it compiles in a deprecated way
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
CASES = ("loss", "ball", "both")
INPUTS = ("arms", "X", "r", "w", "ridge", "level", "radius")


@pytest.fixture(autouse=True)
def one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs(case, family, d=2, n=6, K=2, seed=3, batch=()):
    """Arms, features, rewards, weights, ridge, level and radius with these constraints active."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*batch, *shape, generator=generator, dtype=torch.float64)

    def directions(count):
        x = torch.randn(*batch, count, d, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(x, dim=-1)

    X = directions(n) * uniform(n, 1) ** 0.5
    w = 0.5 + uniform(n)
    truth = directions(1)
    r = torch.sigmoid(8.0 * (X @ truth.mT)[..., 0])
    ridge = torch.full(batch, 0.2, dtype=torch.float64)
    S = torch.full(batch, {"loss": 9.0, "ball": 0.3, "both": 0.25}[case], dtype=torch.float64)
    fit = glb.constrained_mle(
        FAMILIES[family], glb.Rows(X, r, w), glb.Ball(d, S), regularization=ridge
    )
    level = fit.loss + {"loss": 0.3, "ball": 5.0, "both": 0.03}[case]
    arms = directions(K)
    if case == "both":
        # the set is a cap around the minimiser on the sphere: look past its edge
        pole = fit.theta[..., None, :] / S[..., None, None]
        across = arms - (arms * pole).sum(-1, keepdim=True) * pole
        arms = torch.nn.functional.normalize(across, dim=-1) + 0.2 * pole
    return [arms, X, r, w, ridge, level, S]


def solve(family, arms, X, r, w, ridge, level, radius, tol=3e-12):
    loss = glb.NegativeLogLikelihood(FAMILIES[family], X, r, w, regularization=ridge)
    domain = glb.Ball(X.shape[-1], 1.0).resized(radius)
    return native_support(glb.SublevelProgram(loss, domain, level), arms, tol=tol)


def named(family, name):
    """One field of the result as a function of the inputs."""
    return lambda *tensors: getattr(solve(family, *tensors), name)


def needing(tensors, wanted=INPUTS):
    return [t.clone().requires_grad_(n in wanted) for t, n in zip(tensors, INPUTS, strict=True)]


def speed(family):
    """Every entry of the Jacobian for one family, random projections of it for the others."""
    return {"fast_mode": family != "bernoulli"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_the_cases_are_what_they_say(case, family):
    tensors = inputs(case, family)
    result = solve(family, *tensors)
    norm, S = torch.linalg.vector_norm(result.theta, dim=-1), tensors[-1]
    assert (result.multiplier > 0.01).all() == (case != "ball")
    assert (norm > S * (1 - 1e-12)).all() == (case != "loss")
    if case == "both":  # neither would do alone
        assert (result.upper < 0.99 * S * torch.linalg.vector_norm(tensors[0], dim=-1)).all()
    if case == "loss":
        assert (norm < 0.9 * S).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("field", ["upper", "multiplier"])
def test_first_derivatives(case, family, field):
    tensors = needing(inputs(case, family))
    assert gradcheck(named(family, field), tensors, eps=1e-5, atol=1e-6, rtol=1e-6, **speed(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_first_derivatives_of_theta(case, family):
    # the bounds close long before theta has all its digits: a longer step for the differences
    tensors = needing(inputs(case, family))
    assert gradcheck(
        named(family, "theta"), tensors, eps=1e-4, atol=1e-6, rtol=1e-5, **speed(family)
    )


#: by default every case of one family, and of the others the one in which all is active
SOME = [
    pytest.param(case, family, marks=pytest.mark.slow if i and case != "both" else [])
    for i, family in enumerate(FAMILIES)
    for case in CASES
]


@pytest.mark.parametrize(("case", "family"), SOME)
@pytest.mark.parametrize("field", ["upper", "theta", "multiplier"])
def test_second_derivatives(case, family, field):
    tensors = needing(inputs(case, family, n=3, K=1))
    assert gradgradcheck(
        named(family, field), tensors, eps=1e-5, atol=1e-6, rtol=1e-6, **speed(family)
    )


@pytest.mark.parametrize("case", CASES)
def test_envelope_theorem(case):
    """dh/dx = theta, dh/dB = lambda, dh/dS = nu S, dh/dr = lambda dL/dr: written out."""
    tensors = needing(inputs(case, "bernoulli", d=3, n=12))
    arms, X, r, w, ridge, level, S = tensors
    result = solve("bernoulli", *tensors)
    g_arms, g_r, g_w, g_ridge, g_level, g_S = torch.autograd.grad(
        result.upper.sum(), [arms, r, w, ridge, level, S]
    )
    theta, lam = result.theta.detach(), result.multiplier.detach()
    z = theta @ X.detach().mT
    close = {"rtol": 1e-7, "atol": 1e-8}
    torch.testing.assert_close(g_arms, theta, **close)
    torch.testing.assert_close(g_level, lam.sum(), **close)
    torch.testing.assert_close(g_r, (lam @ z) * w.detach(), **close)
    terms = torch.nn.functional.softplus(z) - r.detach() * z
    torch.testing.assert_close(g_w, -lam @ terms, **close)
    torch.testing.assert_close(g_ridge, -0.5 * lam @ theta.square().sum(-1), **close)
    loss = glb.NegativeLogLikelihood(
        glb.Bernoulli(), X.detach(), r.detach(), w.detach(), regularization=ridge.detach()
    )
    gradient = loss.value_and_gradient(theta)[1]
    nu = ((arms.detach() - lam[:, None] * gradient) * theta).sum(-1) / S.detach() ** 2
    torch.testing.assert_close(g_S, (nu * S.detach()).sum(), **close)
    lower = solve("bernoulli", *tensors).lower
    torch.testing.assert_close(torch.autograd.grad(lower.sum(), arms)[0], g_arms, rtol=0, atol=0)


@pytest.mark.parametrize("d", [2, 3, 5])
def test_an_arm_with_many_maximisers(d):
    """Rows of one direction say nothing across it: a question along it has many answers."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(d, generator=generator, dtype=torch.float64)
        x = (0.8 * x / torch.linalg.vector_norm(x)).requires_grad_()
        X, r = x.detach().expand(60, d), (torch.arange(60) % 3 == 0).double()
        level = torch.tensor(41.0, dtype=torch.float64, requires_grad=True)

        def support(arm, rows, level, r=r, d=d):
            loss = glb.NegativeLogLikelihood(glb.Bernoulli(), rows, r)
            return native_support(glb.SublevelProgram(loss, glb.Ball(d, 4.0), level), arm[None])

        result = support(x, X, level)
        slope, price = torch.autograd.grad(result.upper[0], (x, level), retain_graph=True)
        torch.testing.assert_close(slope, result.theta[0].detach())  # a maximiser, in the ball
        torch.testing.assert_close(price, result.multiplier[0].detach(), rtol=1e-3, atol=0.0)
        with pytest.raises(glb.SolverError, match="not a differentiable function of the data"):
            torch.autograd.grad(result.theta.sum(), x)
        # rows and question turned together: <x, theta> is bounded by the level alone
        (slope,) = torch.autograd.grad(support(x, x.expand(60, d), level).upper[0], x)
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-6)


def test_zero_arm_has_zero_derivative():
    """h is not differentiable in x there (any feasible theta will do), but it is in the rest."""
    arms, *rest = inputs("both", "bernoulli")
    arms[0] = 0.0
    tensors = needing([arms, *rest])
    result = solve("bernoulli", *tensors)
    slopes = torch.autograd.grad(result.upper[0], tensors[1:])
    assert all(not slope.any() for slope in slopes)


# ---- transforms -----------------------------------------------------------------------------


@forward_mode
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("field", ["upper", "theta"])
def test_forward_and_reverse_mode_agree(case, field):
    tensors = inputs(case, "bernoulli")
    every = tuple(range(len(tensors)))
    function = named("bernoulli", field)
    reverse = jacrev(function, argnums=every)(*tensors)
    forward = jacfwd(function, argnums=every)(*tensors)
    needed = needing(tensors)
    output = function(*needed)
    assert torch.equal(output.detach(), function(*tensors))
    for name, a, b, t in zip(INPUTS, reverse, forward, needed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=name)
        rows = [torch.autograd.grad(value, t, retain_graph=True)[0] for value in output.reshape(-1)]
        expected = torch.stack(rows).reshape(a.shape)
        torch.testing.assert_close(a, expected, rtol=1e-10, atol=1e-11, msg=name)


@forward_mode
@pytest.mark.parametrize("case", CASES)
def test_nested_reverse_mode_is_the_hessian(case):
    tensors = inputs(case, "poisson", K=1)
    which = (0, 1, 5)  # arms, X, level

    def value(*tensors):
        return solve("poisson", *tensors).upper.sum()

    hessian = jacrev(jacrev(value, argnums=which), argnums=which)(*tensors)
    mixed = jacfwd(jacrev(value, argnums=which), argnums=which)(*tensors)
    first = grad(value, argnums=which)
    h = 1e-5
    for j, place in enumerate(which):
        up, down = ([t.clone() for t in tensors] for _ in range(2))
        entry = (0,) * tensors[place].ndim
        up[place][entry] += h
        down[place][entry] -= h
        for i, (a, b) in enumerate(zip(first(*up), first(*down), strict=True)):
            expected = (a - b) / (2 * h)
            actual = hessian[i][j][(..., *entry)]
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(mixed[i][j][(..., *entry)], actual, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_vmap_over_programs(case):
    """Programs in a vmap axis, in a batch axis, and in a loop: one answer, one gradient."""
    batched = inputs(case, "bernoulli", batch=(3,))

    def value_and_slope(*tensors):
        value, slopes = (
            solve("bernoulli", *tensors).upper,
            jacrev(named("bernoulli", "upper"), argnums=(0, 1, 5, 6))(*tensors),
        )
        return value, slopes

    value, slopes = vmap(value_and_slope)(*batched)
    together = solve("bernoulli", *batched)
    torch.testing.assert_close(value, together.upper, rtol=1e-9, atol=1e-9)
    for b in range(3):
        alone_value, alone_slopes = value_and_slope(*(t[b] for t in batched))
        torch.testing.assert_close(value[b], alone_value, rtol=1e-9, atol=1e-9)
        for a, expected in zip(slopes, alone_slopes, strict=True):
            torch.testing.assert_close(a[b], expected, rtol=1e-8, atol=1e-9)


def test_vmap_over_arms_only():
    """Axes that vmap does not map are shared by all."""
    arms, *rest = inputs("loss", "bernoulli", K=4)
    mapped = vmap(lambda x: solve("bernoulli", x[None], *rest).theta[0])(arms)
    torch.testing.assert_close(mapped, solve("bernoulli", arms, *rest).theta, rtol=1e-7, atol=1e-7)


def test_batched_backward_equals_loop():
    batched = needing(inputs("both", "bernoulli", batch=(2, 2)))
    result = solve("bernoulli", *batched)
    weights = torch.arange(1.0, 9.0).double().reshape(2, 2, 2)
    together = torch.autograd.grad((result.upper * weights).sum(), batched)
    for i in range(2):
        for j in range(2):
            alone = needing([t.detach()[i, j] for t in batched])
            value = solve("bernoulli", *alone).upper
            expected = torch.autograd.grad((value * weights[i, j]).sum(), alone)
            for a, b in zip(together, expected, strict=True):
                torch.testing.assert_close(a[i, j], b, rtol=1e-8, atol=1e-9)


# ---- gradients and failures -----------------------------------------------------------------


def test_failed_elements_get_no_gradient_and_spoil_none():
    batched = inputs("both", "bernoulli", batch=(3,))
    good = needing(batched)
    expected = torch.autograd.grad(solve("bernoulli", *good).upper[::2].sum(), good)
    batched[5][1] = -1.0  # a level below the minimum
    bad = needing(batched)
    arms, X, r, w, ridge, level, S = bad
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, w, regularization=ridge)
    program = glb.SublevelProgram(loss, glb.Ball(2, 1.0).resized(S), level)
    result = native_support(program, arms, tol=3e-12, throw=False)
    assert (result.status[1] == Status.INFEASIBLE).all()
    actual = torch.autograd.grad(result.upper[::2].sum(), bad)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        assert not a[1].any()
    for slope in torch.autograd.grad(
        native_support(program, arms, tol=3e-12, throw=False).upper[1].sum(), bad
    ):
        assert not slope.any()


def test_nothing_requires_grad_without_need():
    tensors = inputs("both", "bernoulli")
    assert not solve("bernoulli", *tensors).upper.requires_grad
    with torch.no_grad():
        assert not solve("bernoulli", *needing(tensors)).upper.requires_grad
    result = solve("bernoulli", *needing(tensors, ("level",)))
    assert result.upper.requires_grad
    assert result.theta.requires_grad
    # the numbers are the same with and without a graph
    plain = solve("bernoulli", *tensors)
    for name in ("upper", "lower", "theta", "multiplier"):
        assert torch.equal(getattr(result, name).detach(), getattr(plain, name)), name


def test_gradient_reaches_a_feature_extractor():
    """The level that depends on the data too: B = min L + beta^2, all of it differentiated."""
    _, raw, r, *_ = inputs("both", "bernoulli", d=2, n=12)
    torch.manual_seed(0)
    extract = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()).double()
    arms = torch.eye(2).double()

    def value():
        X, x = extract(raw) / math.sqrt(3), extract(arms) / math.sqrt(3)
        domain = glb.Ball(3, 4.0)
        fit = glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), domain, regularization=0.1)
        loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, regularization=0.1)
        return glb.support(glb.SublevelProgram(loss, domain, fit.loss + 1.0), x, tol=1e-11).upper

    value().sum().backward()
    weight = extract[0].weight
    h = 1e-5
    for entry in [(0, 0), (1, 1), (2, 0)]:
        values = []
        for step in (h, -2 * h):
            with torch.no_grad():
                weight[entry] += step
                values.append(value().sum())
        with torch.no_grad():
            weight[entry] += h
        expected = (values[0] - values[1]) / (2 * h)
        torch.testing.assert_close(weight.grad[entry], expected, rtol=1e-6, atol=1e-8)


# ---- the other differentiable solver --------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_layer(case, family):
    """cvxpylayers' gradients have five digits on small programs; all of them are ours."""
    arms, X, r, w, _, level, S = inputs(case, family, n=10)
    fit = glb.constrained_mle(FAMILIES[family], glb.Rows(X, r, w), glb.Ball(2, float(S)))
    level = fit.loss + {"loss": 0.3, "ball": 30.0, "both": 0.03}[case]
    layer = UCBLayer(FAMILIES[family], glb.Ball(2, float(S)), capacity=10)
    slopes = []
    for who in ("native", "layer"):
        wanted = [t.clone().requires_grad_() for t in (arms, X, r, w, level)]
        x, *data = wanted
        if who == "layer":
            result = layer(*data, x)
        else:
            loss = glb.NegativeLogLikelihood(FAMILIES[family], *data[:3])
            result = glb.support(glb.SublevelProgram(loss, glb.Ball(2, float(S)), data[3]), x)
        slopes.append(
            (
                torch.autograd.grad(result.upper.sum(), wanted, retain_graph=True),
                torch.autograd.grad(result.theta[0, 0], wanted, allow_unused=True),
            )
        )
    for ours, theirs in zip(*slopes, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            b = torch.zeros_like(a) if b is None else b
            scale = 1 + a.abs().max()
            assert ((a - b).abs() <= 1e-4 * scale).all(), (a - b).abs().max() / scale
