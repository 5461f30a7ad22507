"""Coverage of contrast sequences at all times: misses against delta by an exact binomial test."""

import math

import pytest
import torch
from scipy import stats

import torchglb as glb
from torchglb import ContrastSequence

DTYPE = torch.float64
DESIGNS = ("random", "bandit", "against", "hiding", "along")
FAMILIES = {"gaussian": glb.Gaussian(1.0), "bernoulli": glb.Bernoulli(), "poisson": glb.Poisson()}


def unit(v):
    return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)


def collected(family, design, d, n, R, S, *, boundary, weighted, seed):
    """Rows ``(R, n, d)``, rewards, weights, theta* and the contrast, chosen row by row.

    ``against``: whoever is ahead stops: rows that say next to nothing are played while the true
    score of the contrast is large, in order to keep it there. ``hiding``: nothing along c for the
    first two thirds. ``along``: c and nothing else.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=DTYPE)

    star = unit(normal(R, d)) * S * (1.0 if boundary else 0.6)
    c = unit(normal(d))
    X, r = torch.zeros(R, n, d, dtype=DTYPE), torch.zeros(R, n, dtype=DTYPE)
    w = torch.rand((R, n), generator=generator, dtype=DTYPE) if weighted else None
    inverse, guess = torch.eye(d, dtype=DTYPE).expand(R, d, d).clone(), torch.zeros(R, d).double()
    score, spread = torch.zeros(R).double(), torch.zeros(R).double()
    for t in range(n):
        arms = unit(normal(R, 8, d))
        x = arms[:, 0]
        if design == "bandit":
            width = ((arms @ inverse) * arms).sum(-1).clamp_min(0.0).sqrt()
            best = ((arms @ guess[..., None])[..., 0] + 1.5 * width).argmax(-1)
            x = arms[torch.arange(R), best]
        elif design == "against":
            ahead = score.abs() > 1.5 * spread.sqrt()
            x = torch.where(ahead[:, None], 0.02 * x, unit(c + 0.3 * x))
        elif design == "hiding" and d > 1 and t < 2 * n // 3:
            x = unit(x - (x @ c)[:, None] * c)
        elif design == "along":
            x = c * torch.where(torch.rand(R, generator=generator) < 0.5, 1.0, -1.0)[:, None]
        x = 0.999 * x
        z = (x * star).sum(-1)
        r[:, t] = family.sample(z, generator)
        X[:, t] = x
        score += (x @ c) * (r[:, t] - family.mean(z))
        spread += (x @ c) ** 2 * family.variance(z) * family.dispersion
        step = (inverse @ x[..., None])[..., 0]
        grow = 1.0 + (x * step).sum(-1)
        inverse = inverse - step[:, :, None] * step[:, None, :] / grow[:, None, None]
        surprise = r[:, t] - family.mean((x * guess).sum(-1))
        guess = guess + step * (surprise / grow)[:, None]
        guess = guess * (S / torch.linalg.vector_norm(guess, dim=-1).clamp_min(S))[:, None]
    return X, r, w, star, c


def misses(family, design, d, n, R, deltas, *, boundary=False, weighted=False, seed=0):
    """How many of R runs leave the interval at some look, for each delta; and the mean width."""
    S = 1.5
    X, r, w, star, c = collected(
        family, design, d, n, R, S, boundary=boundary, weighted=weighted, seed=seed
    )
    contrasts = torch.stack([c, unit(c + 2.0 * torch.ones(d, dtype=DTYPE))])
    truth = star @ contrasts.mT
    found, width = [], math.nan
    for delta in deltas:
        sequence = ContrastSequence(
            family, glb.Ball(d, S), contrasts, delta, 0.1, (R,), centred=n > 20
        )
        left = torch.zeros((R, 2), dtype=torch.bool)
        together = torch.zeros(R, dtype=torch.bool)
        start = 0
        for stop in (n // 8, n // 4, n // 2, 3 * n // 4, n):
            part = slice(start, stop)
            sequence.update(X[:, part], r[:, part], None if w is None else w[:, part])
            lower, upper = sequence.current()
            left |= (truth < lower) | (truth > upper)
            lower, upper = sequence.current(simultaneous=True)
            together |= ((truth < lower) | (truth > upper)).any(-1)
            start = stop
        width = float((upper - lower).mean())
        found.append((int(left[:, 0].sum()), int(left[:, 1].sum()), int(together.sum())))
    return found, width


def assert_covered(found, deltas, R):
    for delta, counts in zip(deltas, found, strict=True):
        for count in counts:  # each contrast by itself, then both at once
            assert stats.binomtest(count, R, delta, alternative="greater").pvalue > 1e-3, counts


@pytest.mark.parametrize(
    ("name", "design", "d", "boundary", "weighted"),
    [
        ("bernoulli", "bandit", 3, False, False),
        ("gaussian", "against", 3, True, False),
        ("poisson", "hiding", 1, False, True),
    ],
)
def test_coverage(name, design, d, boundary, weighted):
    R = 24
    found, width = misses(
        FAMILIES[name], design, d, 160, R, (0.5,), boundary=boundary, weighted=weighted
    )
    assert_covered(found, (0.5,), R)
    assert width < 3.0 - 1e-6  # and not because nothing is said


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("d", [1, 3, 10])
@pytest.mark.parametrize("name", FAMILIES)
def test_coverage_of_every_design(name, d, design):
    R, deltas = 60, (0.5, 0.05)
    seed = DESIGNS.index(design)
    found, _ = misses(
        FAMILIES[name],
        design,
        d,
        300,
        R,
        deltas,
        boundary=seed % 2 == 0,
        weighted=seed % 3 == 1,
        seed=seed,
    )
    assert_covered(found, deltas, R)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_true_hypotheses_are_rarely_rejected(name):
    """``P(E_t >= 2 for some look) <= 1/2`` under the null, both e-values of a contrast."""
    family, R, n, d = FAMILIES[name], 60, 300, 2
    X, r, _, star, c = collected(
        family, "bandit", d, n, R, 1.5, boundary=False, weighted=False, seed=5
    )
    sequence = ContrastSequence(family, glb.Ball(d, 1.5), c[None], 0.5, 0.1, (R,))
    truth = (star @ c)[:, None]
    rejected = {relation: torch.zeros(R, dtype=torch.bool) for relation in ("==", "<=", ">=")}
    for start in range(0, n, 100):
        sequence.update(X[:, start : start + 100], r[:, start : start + 100])
        for relation, so_far in rejected.items():
            so_far |= (sequence.test(truth, relation).log_e[:, 0] >= math.log(2.0)).view(R)
    for so_far in rejected.values():
        count = int(so_far.sum())
        assert stats.binomtest(count, R, 0.5, alternative="greater").pvalue > 1e-3
    assert bool((sequence.test(truth + 2.9, "==").log_e > 0.0).float().mean() > 0.5)


def test_a_contrast_picked_after_the_rewards_is_not_promised():
    """The class says so: nobody should have to find out."""
    text = " ".join((ContrastSequence.__doc__ or "").split())
    assert "The contrasts must be chosen before the rewards are seen" in text
