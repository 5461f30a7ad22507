"""Losses of rows in compiled code: those of the likelihood, however the rows lie in memory."""

import pytest
import torch

import torchglb as glb
from torchglb.compiled_rows import blocks, losses

FAMILIES = [
    glb.Bernoulli(),
    glb.Binomial(5),
    glb.Gaussian(0.5),
    glb.Poisson(),
    glb.QuasiBounded("probit"),
]
LAYOUTS = {
    "rows": lambda X: X,
    "features": lambda X: X.mT.contiguous().mT,
    "every other": lambda X: X.repeat_interleave(2, dim=-2)[..., ::2, :],
}


def draw(batch, n, d, generator, dtype=torch.float64):
    X = torch.nn.functional.normalize(torch.randn(*batch, n, d, generator=generator), dim=-1)
    r = (torch.rand(*batch, n, generator=generator) < 0.5).to(dtype)
    points = torch.randn(*batch, 4, d, generator=generator).to(dtype)
    return 0.9 * X.to(dtype), r, torch.rand(*batch, n, generator=generator).to(dtype), points


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "n", "d"), [((), 300, 2), ((3,), 129, 1), ((2, 2), 5, 4)])
def test_they_are_those_of_the_likelihood(family, layout, batch, n, d, generator):
    X, r, w, points = draw(batch, n, d, generator)
    for weights, ridge in ((None, 0.0), (w, 0.3)):
        loss = glb.NegativeLogLikelihood(
            family, LAYOUTS[layout](X), r, weights, regularization=ridge, tilt=points[..., 0, :]
        )
        found = losses(loss, points)
        assert found.shape == (*batch, 4)
        torch.testing.assert_close(found, loss.value(points), rtol=1e-12, atol=1e-12)


def test_rows_of_a_history_with_room(generator):
    X, r, _, points = draw((2,), 70, 3, generator)
    history = glb.History(3, (2,))
    for part in (slice(0, 50), slice(50, 70)):
        history.append(X[:, part], r[:, part])
    loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), history)
    torch.testing.assert_close(losses(loss, points), loss.value(points), rtol=1e-12, atol=0)


def test_float32_is_a_storage_format(generator):
    X, r, w, points = draw((2,), 400, 3, generator, torch.float32)
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, w)
    wide = glb.NegativeLogLikelihood(glb.Bernoulli(), X.double(), r.double(), w.double())
    found = losses(loss, points)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wide.value(points.double()), rtol=1e-7, atol=0)


def test_points_that_nobody_asks_about(generator):
    X, r, _, points = draw((), 50, 2, generator)
    points[1] = torch.nan
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r)
    found = losses(loss, points)
    assert found.isnan().tolist() == [False, True, False, False]


class Softplus(glb.GLMFamily):
    """Without formulas in compiled code."""

    def log_partition(self, z):
        return torch.nn.functional.softplus(z)


def test_what_torch_has_to_do(generator):
    X, r, _, points = draw((), 50, 2, generator)
    plain = glb.NegativeLogLikelihood(glb.Bernoulli(), X, r)
    assert losses(plain, points) is not None
    assert losses(plain, points.clone().requires_grad_()) is None
    recorded = glb.NegativeLogLikelihood(glb.Bernoulli(), X.clone().requires_grad_(), r)
    assert losses(recorded, points) is None
    assert losses(glb.NegativeLogLikelihood(Softplus(), X, r), points) is None


# ---- many rows are read where they lie ---------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [1, 3, 18])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_rows_in_place_give_the_bits_of_copies(batch, d, weighted, generator, monkeypatch):
    """A history with room, through the fit, the level of a posterior radius and the support."""
    X, r, w, points = draw(batch, 300, d, generator)
    options = {"batch_shape": batch}
    found = []
    for place in (0, 1 << 60):
        monkeypatch.setattr("torchglb.compiled_rows.IN_PLACE", place)
        sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(d, 3.0), 0.05, **options)
        for part in (slice(0, 200), slice(200, 300)):
            sequence.update(X[..., part, :], r[..., part], w[..., part] if weighted else None)
        loss = sequence.current().likelihood
        assert (blocks_of(loss).X.ctypes.data == loss.X.data_ptr()) == (place == 0)
        level, ends = sequence.current().level, sequence.current().interval(points)
        found.append((sequence.current().center, level, *ends))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def blocks_of(likelihood):
    (block,) = blocks(likelihood, likelihood.family.compiled(), 1.0, None)
    return block.rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_copied(layout, generator, monkeypatch):
    monkeypatch.setattr("torchglb.compiled_rows.IN_PLACE", 0)
    X, r, _, _ = draw((), 50, 3, generator)
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), LAYOUTS[layout](X), r)
    rows = blocks_of(loss)
    assert (rows.X.ctypes.data == loss.X.data_ptr()) == (layout == "features")
    assert (rows.X[0, :, :50] == X.mT.numpy()).all()
