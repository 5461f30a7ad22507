"""Misses of theta* over time, counted: the short, seeded version of experiments/coverage.py.

Arms are chosen optimistically from the very set that is checked, so the data are adaptive, and the
set is checked at some thirty times. Misses must not be significantly more frequent than delta.
"""

import pytest
import scipy.stats
import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii

DELTA = 0.05
REPLICATES = 80
HORIZON = 100
FAMILIES = {
    "bernoulli": (glb.Bernoulli(), 4.0),
    "gaussian": (glb.Gaussian(1.0), 4.0),
    "poisson": (glb.Poisson(), 2.0),
}


class Third(radii.Radius):
    """A third of the right radius: wrong."""

    inner = radii.PACBayes()

    def init(self, problem):
        return self.inner.init(problem)

    def update(self, problem, state, x, r, w=None):
        return self.inner.update(problem, state, x, r, w)

    def evaluate(self, problem, state, likelihood, estimate):
        found = self.inner.evaluate(problem, state, likelihood, estimate)
        radius = found.radius / 3.0
        return found._replace(level=found.level - 2.0 * radius, radius=radius)


def unit(*shape: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1)


def count_misses(
    name: str, radius: str | radii.Radius, size: float = 0.5, optimistic: bool = True
) -> int:
    """In how many replicates theta*, of norm ``size * S``, is outside at one time or another."""
    family, S = FAMILIES[name]
    generator = torch.Generator().manual_seed(0)
    arms = unit(REPLICATES, 8, 2, generator=generator)
    theta = size * S * unit(REPLICATES, 2, generator=generator)
    sequence = glb.ConfidenceSequence(
        family, glb.Ball(2, S), DELTA, radius, batch_shape=(REPLICATES,), aggregate=True
    )
    every = torch.arange(REPLICATES)
    missed = torch.zeros(REPLICATES, dtype=torch.bool)
    chosen = torch.zeros(REPLICATES, dtype=torch.int64)
    for t in range(HORIZON + 1):
        if t < 16 or t % 6 == 0:
            current = sequence.current()
            missed |= ~current.contains(theta)
            if optimistic:
                chosen = current.upper_bound(arms, tol=1e-3, throw=False).argmax(-1)
            else:
                chosen = torch.randint(8, (REPLICATES,), generator=generator)
        x = arms[every, chosen]
        sequence.update(x, family.sample((x * theta).sum(-1), generator))
    return int(missed.sum())


def check(misses: int) -> None:
    test = scipy.stats.binomtest(misses, REPLICATES, DELTA, alternative="greater")
    assert test.pvalue >= 0.05, f"{misses} of {REPLICATES} missed: significantly above {DELTA}"


@pytest.mark.parametrize("radius", ["pac-bayes", "lipschitz"])
@pytest.mark.parametrize("family", FAMILIES)
def test_coverage(family, radius):
    check(count_misses(family, radius))


@pytest.mark.parametrize("family", FAMILIES)
def test_coverage_on_the_sphere(family):
    check(count_misses(family, "pac-bayes", size=1.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_gaussian_prior_covers_outside_the_ball(family):
    check(count_misses(family, "gaussian-prior", size=1.5, optimistic=False))


@pytest.mark.filterwarnings("ignore::torchglb.errors.BoundaryWarning")
def test_outside_the_ball_the_others_do_not_cover():
    """They assume |theta*| <= S; so the test above is about the prior."""
    misses = count_misses("gaussian", "pac-bayes", size=1.5, optimistic=False)
    assert misses == REPLICATES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_radius_is_found_out(family):
    misses = count_misses(family, Third())
    with pytest.raises(AssertionError, match="significantly above"):
        check(misses)
