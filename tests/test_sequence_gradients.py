"""Derivatives of intervals through encoder, history, estimate, radius and bound."""

import pytest
import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii
from torchglb.sets import LikelihoodRatioSet

RADII = {
    **radii.NAMED,
    "lipschitz-data": radii.Lipschitz(constant="data"),
    "lipschitz-closed": radii.Lipschitz(inf="closed_form"),
    "pac-bayes-uniform": radii.PACBayes(posterior="uniform"),
}
FAMILIES = {
    "bernoulli": glb.Bernoulli(),
    "gaussian": glb.Gaussian(0.7),
    "poisson": glb.Poisson(),
    "probit": glb.QuasiBounded("probit"),
}


def data(family: glb.GLMFamily, n: int, *batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raw inputs ``(*B, n, 3)``, weights of an encoder that require grad, and rewards."""
    generator = torch.Generator().manual_seed(100 + n)
    raw = torch.randn(*batch, n, 3, generator=generator, dtype=torch.float64)
    weights = 0.6 * torch.randn(3, 2, generator=generator, dtype=torch.float64)
    z = encode(raw, weights) @ torch.tensor([1.0, -0.5], dtype=torch.float64)
    return raw, weights.requires_grad_(), family.sample(z, generator)


def encode(raw: Tensor, weights: Tensor) -> Tensor:
    """Features in the unit disc."""
    return torch.tanh(raw @ weights) / 2**0.5


def bounds(
    sequence: glb.ConfidenceSequence, X: Tensor, r: Tensor, x: Tensor, scale: str = "linear"
) -> tuple[Tensor, Tensor]:
    """Ends of an interval, after two updates and a look in between."""
    half = X.shape[-2] // 2
    sequence.update(X[..., :half, :], r[..., :half])
    if half >= X.shape[-1] or not sequence.ellipsoidal:  # the centre of an ellipsoid must be unique
        sequence.current()
    sequence.update(X[..., half:, :], r[..., half:])
    interval = sequence.current().interval(x, scale=scale)
    return interval.lower, interval.upper


def check(family: glb.GLMFamily, radius: str, n: int, S: float = 2.0, **options: object) -> None:
    raw, weights, r = data(family, n)
    x = torch.tensor([0.6, 0.3], dtype=torch.float64, requires_grad=True)

    def through(weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        sequence = glb.ConfidenceSequence(family, glb.Ball(2, S), 0.05, RADII[radius], **options)
        return bounds(sequence, encode(raw, weights), r, x)

    assert torch.autograd.gradcheck(through, (weights, x), eps=1e-6, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("radius", ["pac-bayes", "gaussian-prior", "mean-loss", "lipschitz-data"])
def test_likelihood_ratio_sets(radius):
    check(glb.Bernoulli(), radius, 30)


@pytest.mark.parametrize("radius", ["pac-bayes", "lipschitz", "mixture"])
def test_few_rows(radius):
    check(glb.Bernoulli(), radius, 3)


def scarce(n: int, d: int, *batch: int) -> tuple[Tensor, Tensor]:
    """Rows with rewards between the classes: from n < d of them theta_hat is inside, not unique."""
    generator = torch.Generator().manual_seed(10 * n + d)
    X = torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)
    X = 0.8 * X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    r = 0.3 + 0.4 * torch.rand(*batch, n, generator=generator, dtype=torch.float64)
    return X.requires_grad_(), r.requires_grad_()


def after(X: Tensor, r: Tensor, radius: str = "pac-bayes", **options: object) -> LikelihoodRatioSet:
    ball = glb.Ball(X.shape[-1], 2.0)
    batch = tuple(X.shape[:-2])
    sequence = glb.ConfidenceSequence(
        glb.Bernoulli(), ball, 0.05, RADII[radius], batch_shape=batch, **options
    )
    sequence.update(X, r)
    return sequence.current()


@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 3), (3, 5)])
@pytest.mark.parametrize("radius", ["pac-bayes", "lipschitz"])
def test_fewer_rows_than_features(radius, n, d):
    inputs = scarce(n, d)

    def through(X: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        current = after(X, r, radius)
        return current.level, current.upper_bound(torch.full((d,), 1 / d).double())

    assert torch.autograd.gradcheck(through, inputs, eps=1e-6, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 3)])
def test_second_derivatives_from_fewer_rows_than_features(n, d):
    inputs = scarce(n, d)
    assert torch.autograd.gradgradcheck(lambda X, r: after(X, r, "lipschitz").level, inputs)


@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 3), (3, 5)])
def test_what_depends_on_an_estimate_that_is_not_unique_has_no_gradient(n, d):
    X, r = scarce(n, d)
    current = after(X, r)
    for part in (current.center.sum(), current.ellipsoid().upper_bound(torch.ones(d).double())):
        with pytest.raises(glb.SolverError, match="not a differentiable function of the data"):
            part.backward()
    with pytest.raises(glb.SolverError, match="not a differentiable function of the data"):
        after(X, r, ellipsoidal=True)


def test_a_companion_whose_estimate_is_not_unique_changes_nothing():
    X, r = (t.detach() for t in scarce(4, 3, 2))
    X[1] = X[1, :1]  # one direction, four times: the second estimate is not unique
    X.requires_grad_()
    arm = torch.full((2, 3), 0.5).double()
    both = after(X, r)
    slopes = [torch.autograd.grad(both.upper_bound(arm).sum(), X, retain_graph=True)[0]]
    slopes += torch.autograd.grad(both.center[0].sum(), X)
    for i in range(2):
        row = X[i].detach().requires_grad_()
        one = after(row, r[i])
        (slope,) = torch.autograd.grad(one.upper_bound(arm[i]), row, retain_graph=True)
        torch.testing.assert_close(slopes[0][i], slope)
        if i == 0:
            (slope,) = torch.autograd.grad(one.center.sum(), row)
            torch.testing.assert_close(slopes[1], torch.stack([slope, torch.zeros_like(slope)]))


@pytest.mark.parametrize(("family", "n"), [("probit", 2), ("probit", 8), ("bernoulli", 8)])
def test_unconfined_sets_of_few_rows(family, n):
    """They are searched far outside of the ball, where the loss is made of planes with edges."""
    generator = torch.Generator().manual_seed(n + 17)

    def unit(*shape: int) -> Tensor:
        rows = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)

    X, theta = 0.9 * unit(200, n, 3), 3.0 * unit(200, 3, 1)
    r = FAMILIES[family].sample((X @ theta)[..., 0], generator)
    ball = glb.Ball(3, 5.0)
    sequence = glb.ConfidenceSequence(
        FAMILIES[family], ball, 0.05, "gaussian-prior", batch_shape=(200,)
    )
    sequence.update(X.requires_grad_(), r)
    interval = sequence.current().interval(unit(200, 4, 3))
    ends = torch.cat(interval)
    (slope,) = torch.autograd.grad(ends[torch.isfinite(ends)].sum(), X)
    assert bool((interval.width > 0).all())
    assert bool(torch.isfinite(slope).all())


@pytest.mark.parametrize("ellipsoid", ["fixed_point", "theorem"])
def test_ellipsoids(ellipsoid):
    check(glb.Bernoulli(), "pac-bayes", 30, ellipsoidal=True, ellipsoid=ellipsoid)


@pytest.mark.parametrize(
    ("family", "radius"), [("gaussian", "lipschitz-data"), ("poisson", "pac-bayes")]
)
def test_families(family, radius):
    check(FAMILIES[family], radius, 12, S=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("n", [2, 7, 60])
def test_everything(family, radius, n):
    if not RADII[radius].confined and n < 60:
        pytest.skip("so few rows leave an unconfined set without an end")
    if family == "probit" and "lipschitz" not in radius and n == 60:
        n = 20  # its log-partition is slow
    check(FAMILIES[family], radius, n)
    if RADII[radius].confined:
        check(FAMILIES[family], radius, n, ellipsoidal=True)


def test_a_batch_of_mixed_radii():
    raw, weights, r = data(glb.Bernoulli(), 12, 2)
    x = torch.tensor([[0.6, 0.3], [0.0, -0.9]], dtype=torch.float64, requires_grad=True)
    S = torch.tensor([1.0, 3.0], dtype=torch.float64)

    def through(weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S), 0.05, batch_shape=(2,))
        return bounds(sequence, encode(raw, weights), r, x, "mean")

    assert torch.autograd.gradcheck(through, (weights, x), eps=1e-6, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("radius", ["pac-bayes", "lipschitz-data"])
def test_rewards_and_weights(radius):
    X = encode(*data(glb.Bernoulli(), 8)[:2]).detach()
    generator = torch.Generator().manual_seed(0)
    r, w = 0.1 + 0.8 * torch.rand(2, 8, generator=generator, dtype=torch.float64)
    x = torch.tensor([0.6, 0.3], dtype=torch.float64)

    def through(r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ball = glb.Ball(2, 2.0)
        sequence = glb.ConfidenceSequence(glb.Bernoulli(), ball, 0.05, RADII[radius])
        sequence.update(X, r, w)
        interval = sequence.current().interval(x)
        return interval.lower, interval.upper

    inputs = (r.requires_grad_(), w.requires_grad_())
    assert torch.autograd.gradcheck(through, inputs, eps=1e-6, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("radius", RADII)
def test_a_zero_feature_has_a_derivative(radius):
    X = torch.zeros(4, 2, dtype=torch.float64)
    X[1:] = encode(*data(glb.Bernoulli(), 3)[:2]).detach()
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05, RADII[radius])
    sequence.update(X.requires_grad_(), torch.tensor([1.0, 0.0, 1.0, 1.0]).double())
    (slope,) = torch.autograd.grad(sequence.current().interval([0.6, 0.3]).upper, X)
    assert bool(torch.isfinite(slope).all())


def test_the_radius_itself_depends_on_the_features():
    """What was left out as long as the radius counted as a constant of them."""
    raw, weights, r = data(glb.Bernoulli(), 30)
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    sequence.update(encode(raw, weights), r)
    (slope,) = torch.autograd.grad(sequence.evaluation().radius, weights)
    assert float(slope.abs().max()) > 1e-3


def test_the_level_is_valid_and_hardly_changed_by_asking_for_gradients():
    raw, weights, r = data(glb.Bernoulli(), 60)
    X = encode(raw, weights)
    plain = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    smooth = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    plain.update(X.detach(), r)
    smooth.update(X, r)
    torch.testing.assert_close(
        smooth.evaluation().radius.detach(), plain.evaluation().radius, rtol=0.02, atol=0.0
    )


def test_a_saved_state_carries_no_graph():
    raw, weights, r = data(glb.Bernoulli(), 10)
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    sequence.update(encode(raw, weights), r)
    sequence.current()
    state = sequence.state_dict()
    assert not any(t.requires_grad for t in state["radius"].values())
    assert state["estimator"] == {}
    other = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    other.load_state_dict(state)
    torch.testing.assert_close(
        other.evaluation().level, sequence.evaluation().level.detach(), rtol=0.02, atol=0.0
    )
