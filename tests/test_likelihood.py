import itertools
import math

import pytest
import torch
from problems import FAMILY_NAMES, KINDS, random_problem, reference_families

import torchglb as glb

BATCHES = [(), (1,), (3,), (2, 3)]
FAMILIES = list(reference_families())


def rows(batch, n, d, generator, family=None, dtype=torch.float64, weighted=True) -> glb.Rows:
    X = torch.randn((*batch, n, d), generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    r = (family or glb.Bernoulli()).sample(X.sum(-1), generator)
    w = torch.rand((*batch, n), generator=generator, dtype=torch.float64)
    return glb.Rows(X.to(dtype), r.to(dtype), w.to(dtype) if weighted else None)


def full_loss(family, data: glb.Rows, regularization, tilt) -> glb.NegativeLogLikelihood:
    return glb.NegativeLogLikelihood(family, *data, regularization=regularization, tilt=tilt)


@pytest.mark.parametrize("seed", range(0, 8 * 7, 5))
def test_loss_and_gradient_are_those_of_numpy(seed):
    problem = random_problem(seed)
    likelihood = glb.NegativeLogLikelihood(problem.family, *problem.rows)
    theta = torch.randn(
        likelihood.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    theta = problem.domain.project(theta)
    value, gradient = problem.loss(theta.numpy())
    at = likelihood.expand(theta)
    terms = float(likelihood.r.abs().sum() * theta.norm() + abs(value) + 1)
    assert math.isclose(at.loss, value, rel_tol=1e-12, abs_tol=1e-14 * terms)
    scale = float(torch.as_tensor(gradient).abs().max() + likelihood.r.abs().sum())
    torch.testing.assert_close(
        at.gradient, torch.as_tensor(gradient), rtol=1e-11, atol=1e-13 * scale
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("extras", [False, True])
def test_derivatives_are_those_of_autograd(name, extras, generator):
    family = reference_families()[name].family
    data = rows((2,), 9, 3, generator, family, weighted=extras)
    tilt = torch.randn((2, 3), generator=generator, dtype=torch.float64) if extras else None
    ridge = torch.tensor([0.3, 1.5], dtype=torch.float64) if extras else 0.0
    likelihood = full_loss(family, data, ridge, tilt)
    theta = torch.randn((2, 3), generator=generator, dtype=torch.float64)
    loss, gradient, hessian = likelihood.expand(theta)
    torch.testing.assert_close(likelihood(theta), loss)
    torch.testing.assert_close(likelihood.value_and_gradient(theta)[1], gradient)
    torch.testing.assert_close(torch.func.grad(lambda t: likelihood(t).sum())(theta), gradient)
    jacobian = torch.func.jacrev(lambda t: likelihood.value_and_gradient(t)[1])(theta)
    for b in range(2):
        torch.testing.assert_close(jacobian[b, :, b], hessian[b])
        assert jacobian[b, :, 1 - b].abs().max() == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.hessian
@pytest.mark.parametrize("name", FAMILIES)
def test_autograd_is_right_at_zero(name, generator):
    """Where |z| has a kink, the loss has none."""
    family = reference_families()[name].family
    data = rows((), 9, 3, generator, family)
    likelihood = glb.NegativeLogLikelihood(family, *data)
    zero = torch.zeros(3, dtype=torch.float64)
    for loss in (likelihood.value, lambda t: likelihood.expand(t).loss):
        torch.testing.assert_close(torch.func.grad(loss)(zero), likelihood.expand(zero).gradient)
        torch.testing.assert_close(torch.func.hessian(loss)(zero), likelihood.expand(zero).hessian)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("d", [2, 6])  # the Hessians of many points are computed in two ways
def test_batch_and_points_equal_a_loop(batch, d, dtype, generator):
    family, points = glb.Bernoulli(), 4
    data = rows(batch, 11, d, generator, dtype=dtype)
    ridge = torch.rand(batch, generator=generator, dtype=torch.float64).to(dtype)
    tilt = torch.randn((*batch, d), generator=generator, dtype=torch.float64).to(dtype)
    theta = torch.randn((*batch, points, d), generator=generator, dtype=torch.float64).to(dtype)
    likelihood = full_loss(family, data, ridge, tilt)
    many = likelihood.expand(theta)
    value, (loss, gradient) = likelihood(theta), likelihood.value_and_gradient(theta)
    assert value.shape == loss.shape == many.loss.shape == (*batch, points)
    assert gradient.shape == many.gradient.shape == (*batch, points, d)
    assert many.hessian.shape == (*batch, points, d, d)
    assert {t.dtype for t in (value, loss, gradient, *many)} == {dtype}
    close = dict(rtol=100 * torch.finfo(dtype).eps, atol=100 * torch.finfo(dtype).eps)
    for i in itertools.product(*(range(k) for k in batch)):
        alone = full_loss(family, glb.Rows(*(t[i] for t in data)), ridge[i], tilt[i])
        for p in range(points):
            one = alone.expand(theta[i][p])
            assert one.loss.shape == ()
            torch.testing.assert_close(many.loss[i][p], one.loss, **close)
            torch.testing.assert_close(value[i][p], one.loss, **close)
            torch.testing.assert_close(loss[i][p], one.loss, **close)
            torch.testing.assert_close(many.gradient[i][p], one.gradient, **close)
            torch.testing.assert_close(gradient[i][p], one.gradient, **close)
            torch.testing.assert_close(many.hessian[i][p], one.hessian, **close)
    single = likelihood.expand(theta[..., 0, :])
    for a, b in zip(single, many, strict=True):
        torch.testing.assert_close(a, b.select(len(batch), 0), **close)


def test_weights_repeat_rows(generator):
    data = rows((), 6, 2, generator, weighted=False)
    counts = torch.tensor([1, 3, 0, 2, 1, 5])
    repeated = [t.repeat_interleave(counts, dim=0) for t in data[:2]]
    theta = torch.randn(2, generator=generator, dtype=torch.float64)
    weighted = glb.NegativeLogLikelihood(glb.Poisson(), *data[:2], counts.double()).expand(theta)
    plain = glb.NegativeLogLikelihood(glb.Poisson(), *repeated).expand(theta)
    for a, b in zip(weighted, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_no_rows():
    empty = glb.Rows(torch.zeros(3, 0, 2), torch.zeros(3, 0))
    loss, gradient, hessian = glb.NegativeLogLikelihood.of(glb.Poisson(), empty).expand(
        torch.ones(3, 2)
    )
    assert loss.tolist() == [0.0] * 3
    assert gradient.abs().sum() == 0
    assert hessian.shape == (3, 2, 2)
    ridged = glb.NegativeLogLikelihood.of(glb.Poisson(), empty, regularization=2.0)
    assert ridged(torch.ones(3, 2)).tolist() == [2.0] * 3


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_parts_of_an_expansion(name, generator):
    family = reference_families()[name].family
    X, r, w = rows((2,), 30, 3, generator)
    likelihood = glb.NegativeLogLikelihood(family, X, r, w, regularization=0.3)
    theta = torch.randn((2, 3), generator=generator, dtype=torch.float64)
    loss, gradient, hessian = likelihood.expand(theta)
    torch.testing.assert_close(likelihood.value(theta), loss)
    torch.testing.assert_close(likelihood.value_and_gradient(theta), (loss, gradient))
    torch.testing.assert_close(likelihood.hessian(theta), hessian)


def test_gradients_reach_the_data(generator):
    X, r, w = (t.requires_grad_() for t in rows((2,), 5, 3, generator))
    ridge = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    tilt = torch.randn((2, 3), generator=generator, dtype=torch.float64, requires_grad=True)
    theta = torch.randn((2, 3), generator=generator, dtype=torch.float64, requires_grad=True)

    def expand(X, r, w, ridge, tilt, theta):
        loss = full_loss(glb.Binomial(3), glb.Rows(X, r, w), ridge, tilt)
        return (loss(theta), *loss.expand(theta))

    assert torch.autograd.gradcheck(expand, (X, r, w, ridge, tilt, theta))


def test_of_takes_a_history_as_it_stands(generator):
    history = glb.History(2)
    data = rows((), 4, 2, generator)
    history.append(*data)
    likelihood = glb.NegativeLogLikelihood.of(glb.Bernoulli(), history)
    history.append(*data)
    assert likelihood.X.shape == (4, 2)
    assert isinstance(likelihood, torch.nn.Module)
    assert likelihood.dim == 2
    assert likelihood.batch_shape == ()


X = torch.zeros(2, 3, 4)
R = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "keywords"),
    [
        ("X", (torch.zeros(3), torch.zeros(3)), {}),
        ("X", (X.cfloat(), R), {}),
        ("X", ([["one"]], R), {}),
        ("r", (X, R.double() + 0.1), {}),
        ("r", (X, R[:1]), {}),
        ("r", (X, R.to("meta")), {}),
        ("r", (X, [[None] * 3] * 2), {}),
        ("w", (X, R, R[..., :1]), {}),
        ("w", (X, R, R.double() + 0.1), {}),
        ("regularization", (X, R), dict(regularization=-1.0)),
        ("regularization", (X, R), dict(regularization=math.nan)),
        ("regularization", (X, R), dict(regularization=math.inf)),
        ("regularization", (X, R), dict(regularization="much")),
        ("regularization", (X, R), dict(regularization=torch.zeros(3))),
        ("regularization", (X, R), dict(regularization=torch.zeros(2).double() + 0.1)),
        ("tilt", (X, R), dict(tilt=torch.zeros(4))),
        ("tilt", (X, R), dict(tilt=torch.zeros(2, 4).double() + 0.1)),
    ],
)
def test_bad_input_is_named(name, arguments, keywords):
    with pytest.raises(glb.InputError, match=rf"^{name}: expected .+, got .+"):
        glb.NegativeLogLikelihood(glb.Bernoulli(), *arguments, **keywords)


def test_theta_of_another_shape_is_refused():
    likelihood = glb.NegativeLogLikelihood(glb.Bernoulli(), X, R)
    for theta in (
        torch.zeros(4),
        torch.zeros(2, 3),
        torch.zeros(3, 5, 4),
        torch.zeros(2, 4).double() + 0.1,
    ):
        with pytest.raises(glb.InputError, match="^theta: expected .+, got .+"):
            likelihood(theta)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("X", lambda X, r, w: (X * math.nan, r, w)),
        ("X", lambda X, r, w: (X + math.inf, r, w)),
        ("r", lambda X, r, w: (X, r + 2.0, w)),
        ("r", lambda X, r, w: (X, r * math.nan, w)),
        ("w", lambda X, r, w: (X, r, w - 1.0)),
        ("w", lambda X, r, w: (X, r, w + math.inf)),
    ],
)
def test_bad_values_are_named(name, change, generator):
    data = rows((2,), 5, 3, generator)
    glb.NegativeLogLikelihood(glb.Bernoulli(), *data).check_values()
    with pytest.raises(glb.InputError, match=rf"^{name}: expected .+, got .+ at index \(0, 0"):
        glb.NegativeLogLikelihood(glb.Bernoulli(), *change(*data)).check_values()


def test_large_finite_values_are_finite():
    """The quick look at a sum may overflow; the answer must not."""
    data = glb.Rows(
        torch.full((4, 2), 1e308, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    )
    glb.NegativeLogLikelihood(glb.Bernoulli(), *data).check_values()


def test_generator_covers_what_it_promises():
    """The problems of the random tests: every kind with every family."""
    seen = {
        tuple(random_problem(seed).name.split("-")[1:3])
        for seed in range(len(KINDS) * len(FAMILIES))
    }
    assert len(seen) == len(KINDS) * len(FAMILIES)


def test_rows_that_are_parameters_are_registered():
    """Features that are learnt belong to the module, plain rows do not."""
    X, r = torch.nn.Parameter(torch.eye(2)), torch.tensor([1.0, 0.0])
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r)
    assert [name for name, _ in loss.named_parameters()] == ["X"]
    assert loss.X is X
    loss(torch.ones(2)).backward()
    assert X.grad is not None
    assert not list(glb.NegativeLogLikelihood(glb.Bernoulli(), X.detach(), r).parameters())


@pytest.mark.parametrize("weighted", [False, True])
def test_single_precision_of_precise_gaussians_pays_little(generator, weighted):
    """Rewards of size 4 and noise 0.1: ``z^2/2 - r z`` alone would cost some 400 here."""
    n, d = 100_000, 4
    X = torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=-1)
    theta = 3.6 * torch.nn.functional.normalize(torch.randn(d, generator=generator), dim=0)
    r = X @ theta + 0.1 * torch.randn(n, generator=generator)
    w = torch.rand(n, generator=generator) if weighted else None
    single = glb.NegativeLogLikelihood(glb.Gaussian(0.1), X, r, w)
    double = glb.NegativeLogLikelihood(
        glb.Gaussian(0.1), X.double(), r.double(), None if w is None else w.double()
    )
    points = torch.stack([theta, theta + 0.01, 0.0 * theta])
    for at in (theta, points):
        found, errors = single.expand_with_errors(at)
        exact = double.expand(at.double())
        assert bool(((found.loss.double() - exact.loss).abs() <= errors.loss).all())
        difference = torch.linalg.vector_norm(found.gradient.double() - exact.gradient, dim=-1)
        assert bool((difference <= errors.gradient).all())
        first = errors.loss if at.ndim == 1 else errors.loss[0]
        assert float(first) < 8.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("points", [(), (4,)])
def test_many_rows_are_summed_in_parts(dtype, points, generator, monkeypatch):
    X = torch.nn.functional.normalize(torch.randn(2, 500, 3, generator=generator), dim=-1).to(dtype)
    r, w = (torch.rand(2, 500, generator=generator).to(dtype) for _ in range(2))
    theta = torch.randn(2, *points, 3, generator=generator).to(dtype)
    loss = glb.NegativeLogLikelihood(glb.Gaussian(0.5), X, r, w, regularization=0.3)

    def everything():
        at, errors = loss.expand_with_errors(theta)
        first = [*loss.value_and_gradient(theta), loss.value(theta), loss.hessian(theta)]
        return [*first, *loss.expand(theta), *at], errors

    (whole, errors), sizes = everything(), []
    monkeypatch.setattr("torchglb.rows.sums.MANY", 400)
    sizes = [part.X.shape[-2] for part in loss.parts()]
    assert sizes == [33] * 15 + [5]
    parts, wider = everything()
    for one, other in zip(parts, whole, strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert bool((wider.loss > errors.loss).all())  # more additions, one after the other
