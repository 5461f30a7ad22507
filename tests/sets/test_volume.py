"""Areas of thin sets: against closed forms and a fine reference, in any position."""

import math

import pytest
import torch

import torchglb as glb

DOUBLE = torch.float64
ASPECTS = [1.0, 10.0, 100.0, 1e3, 1e4]


def turned(aspect: float, angle: float = 0.3) -> torch.Tensor:
    """A metric with half-axes 1 and 1/aspect."""
    c, s = math.cos(angle), math.sin(angle)
    basis = torch.tensor([[c, -s], [s, c]], dtype=DOUBLE)
    return basis @ torch.diag(torch.tensor([1.0, aspect**2], dtype=DOUBLE)) @ basis.mT


def gaussian_set(aspect: float, center=(0.3, -0.2), S: float = 5.0, beta2: float = 0.5):
    """A likelihood-ratio set that is an ellipse: Gaussian rewards, area ``2 pi beta2 / sqrt(det H)``."""
    W = turned(aspect)
    values, basis = torch.linalg.eigh(W)
    X = (basis * values.sqrt()).mT / values.max().sqrt()
    weights = torch.full((2,), float(values.max()), dtype=DOUBLE)
    theta = torch.tensor(center, dtype=DOUBLE)
    loss = glb.NegativeLogLikelihood(glb.Gaussian(1.0), X, X @ theta, weights)
    return glb.LikelihoodRatioSet(loss, glb.Ball(2, S), loss(theta) + beta2, theta)


@pytest.mark.parametrize("aspect", ASPECTS)
@pytest.mark.parametrize("num", [64, 720])
def test_an_ellipse_has_the_area_of_an_ellipse(aspect, num):
    exact = math.pi * 2 * 0.5 / aspect
    ellipse = gaussian_set(aspect)
    assert float(ellipse.volume(num)) == pytest.approx(exact, rel=1e-5)
    shape, gamma = turned(aspect), torch.tensor(1.0, dtype=DOUBLE)
    theta = ellipse.center
    ball = glb.Ball(2, 5.0)
    cut = glb.EllipsoidSet(glb.Gaussian(), ball, theta, shape, gamma, with_ball=True)
    whole = glb.EllipsoidSet(glb.Gaussian(), ball, theta, shape, gamma)
    assert float(cut.volume(num)) == pytest.approx(math.pi / aspect, rel=1e-9)
    assert float(whole.volume()) == pytest.approx(math.pi / aspect, rel=1e-9)
    both = cut.intersect(whole)
    assert float(both.volume(num)) == pytest.approx(math.pi / aspect, rel=1e-5)


@pytest.mark.parametrize("aspect", ASPECTS)
def test_a_strip_of_the_ball(aspect):
    """An ellipse far longer than the ball leaves a strip: its area is an integral of chords."""
    S, half = 1.0, 1.0 / aspect
    shape = torch.diag(torch.tensor([1e-8, aspect**2], dtype=DOUBLE))
    cut = glb.EllipsoidSet(
        glb.Gaussian(),
        glb.Ball(2, S),
        torch.zeros(2, dtype=DOUBLE),
        shape,
        torch.tensor(1.0, dtype=DOUBLE),
        with_ball=True,
    )
    y = (torch.arange(20_000, dtype=DOUBLE) + 0.5) / 20_000 * half
    exact = float(4 * (S * S - y * y).clamp_min(0).sqrt().mean() * half)
    assert float(cut.volume(720)) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("n", [30, 200])
def test_a_curved_set_against_a_fine_reference(n):
    """Logistic rows along nearly one direction: many spokes agree with few."""
    generator = torch.Generator().manual_seed(n)
    X = torch.randn(n, 2, generator=generator, dtype=DOUBLE) * torch.tensor([1.0, 0.01]).double()
    X = X / X.norm(dim=-1).max()
    r = torch.bernoulli(torch.sigmoid(3 * X[:, 0]), generator=generator)
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 6.0), delta=0.05)
    sequence.update(X, r)
    made = sequence.current()
    few, many = float(made.volume(64)), float(made.volume(1000))
    assert few == pytest.approx(many, rel=2e-2)
    # by lines along the first axis, with no polar coordinates
    lines = torch.linspace(-6, 6, 201, dtype=DOUBLE)
    grid = torch.stack(torch.meshgrid(lines, lines, indexing="ij"), -1).reshape(-1, 2)
    share = float(made.contains(grid).double().mean()) * 12.0**2 * (201 / 200) ** 2
    assert many == pytest.approx(share, rel=2e-2)


@pytest.mark.parametrize("aspect", ASPECTS)
def test_boundaries_of_thin_sets_show_their_ends(aspect):
    """Of 100 points some are near both ends of the long axis."""
    made = gaussian_set(aspect)
    points = made.boundary(100) - made.center
    assert float(points.norm(dim=-1).max()) >= 0.99
    assert float(made.slack(points + made.center).abs().max()) <= 1e-6
    turns = torch.atan2(points[:, 1], points[:, 0]).diff() % (2 * math.pi)
    assert float(turns.sum()) <= 2 * math.pi  # counter-clockwise, once around


def test_the_last_digit_of_a_level_does_not_move_the_boundary():
    """A search that stops where rounding decides must not choose the frame of the points."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 6, 2, generator=generator, dtype=DOUBLE)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
    r = X.sum(-1) + torch.randn(200, 6, generator=generator, dtype=DOUBLE)
    family, ball = glb.Gaussian(1.0), glb.Ball(2, 3.0)
    fit = glb.constrained_mle(family, glb.Rows(X, r), ball)
    loss = glb.NegativeLogLikelihood(family, X, r)
    near, far = (
        glb.LikelihoodRatioSet(loss, ball, fit.loss + beta2, fit.theta, confined=False)
        for beta2 in (6.0, 6.0 * (1.0 + 1e-13))
    )
    torch.testing.assert_close(near.boundary(16), far.boundary(16), rtol=1e-10, atol=1e-10)
