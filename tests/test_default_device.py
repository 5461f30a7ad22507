"""With another default device, and under autocast, what lives on the CPU is computed there."""

import pytest
import torch

import torchglb as glb

CPU = {"dtype": torch.float64, "device": "cpu"}
RADII = ["pac-bayes", "mixture", "mean-loss", "lipschitz", "gaussian-prior", "covering"]


def rows():
    return torch.eye(2, **CPU).repeat(4, 1), torch.tensor([1.0, 0.0] * 4, **CPU)


def estimate(**options):
    history = glb.History(2, family=glb.Bernoulli(), device="cpu")
    history.append(*rows())
    return glb.constrained_mle(glb.Bernoulli(), history, glb.Ball(2, 3.0), **options).theta


def merged():
    history = glb.History(2, aggregate=True, device="cpu")
    history.append(*rows())
    return history.w


def bounds():
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), *rows())
    program = glb.SublevelProgram(loss, glb.Ball(2, 3.0), torch.tensor(5.0, **CPU))
    return glb.support(program, torch.eye(2, **CPU)).upper


def interval(radius, **options):
    sequence = glb.ConfidenceSequence(
        glb.Bernoulli(), glb.Ball(2, 3.0), 0.05, radius, device="cpu", **options
    )
    sequence.update(*rows())
    return sequence.current().interval(torch.eye(2, **CPU)).width


CALLS = {
    "newton": estimate,
    "lbfgs": lambda: estimate(solver="lbfgs"),
    "merged": merged,
    "support": bounds,
    "ellipsoid": lambda: interval("pac-bayes", ellipsoidal=True),
    **{name: lambda name=name: interval(name) for name in RADII},
}


@pytest.mark.parametrize("name", CALLS)
def test_another_default_device_changes_nothing(name):
    expected = CALLS[name]()
    with torch.device("meta"):
        found = CALLS[name]()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_nothing_in_float64(name):
    expected = CALLS[name]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[name]()
    assert torch.equal(found, expected)


def test_autocast_changes_nothing_in_float32():
    """Autocast would turn products of float32 into bfloat16, which proves nothing."""
    X, r = (t.float() for t in rows())

    def both():
        fit = glb.constrained_mle(glb.Bernoulli(), glb.Rows(X, r), glb.Ball(2, 3.0))
        sequence = glb.ConfidenceSequence(
            glb.Bernoulli(), glb.Ball(2, 3.0), 0.05, dtype=torch.float32
        )
        sequence.update(X, r)
        return fit.theta, sequence.current().interval(torch.eye(2)).upper

    expected = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
