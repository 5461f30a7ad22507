"""theta* in the sets of all policies that have one: misses counted, while they play.

Data are adaptive (the policy's own choices), theta* is inside the ball or on its boundary, and a
miss at any round counts. Misses must not be significantly more frequent than delta.
"""

import mpmath
import pytest
import scipy.stats
import torch

import torchglb as glb
from torchglb import policies
from torchglb.policies.mirror_descent import chord_curvature

REPLICATES, HORIZON = 100, 120
BOUNDED = {
    "bernoulli": (glb.Bernoulli(), 4.0),
    "bernoulli, small": (glb.Bernoulli(), 0.2),
    "bernoulli, large": (glb.Bernoulli(), 30.0),
}
EVERY = BOUNDED | {
    "gaussian": (glb.Gaussian(1.0), 4.0),
    "gaussian, precise": (glb.Gaussian(0.1), 1.0),
    "poisson": (glb.Poisson(), 2.0),
    "probit": (glb.QuasiBounded("probit"), 2.0),
    "binomial": (glb.Binomial(4), 2.0),
}
ONE_PASS = ("glb-omd", "glb-omd-realised", "glb-omd-rows")
CASES = [
    *((name, world) for name in ONE_PASS for world in EVERY),
    *(("gloc", world) for world in EVERY if world != "poisson"),
    *((name, world) for name in ("ada-ofu-ecolog", "ol2m") for world in BOUNDED),
    ("oful", "gaussian"),
    ("oful", "gaussian, precise"),
    *(("glm-ucb", world) for world in (*BOUNDED, "probit", "binomial")),
    *(("log-ucb-1", world) for world in BOUNDED),
    ("ofuglb-e", "bernoulli"),
]
#: likelihood-ratio sets; policies do not give them an event yet
EXACT = ("ofuglb", "ofuglb-pb", "emk", "ofulog+", "ofulog-r")
UNNAMED = (*EXACT, "ofuglb-e", "ol2m")


def unit(*shape, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1)


def count_misses(
    name,
    family,
    S,
    *,
    dim=2,
    delta=0.05,
    size=1.0,
    shrink=1.0,
    rewards=None,
    dtype=torch.float64,
    horizon=HORIZON,
):
    """Replicates in which theta*, of norm ``size * S``, is outside at one round or another."""
    generator = torch.Generator().manual_seed(3)
    arms = unit(REPLICATES, 8, dim, generator=generator)
    theta = size * S * unit(REPLICATES, dim, generator=generator)
    policy = policies.make(
        name, family=family, domain=glb.Ball(dim, S), delta=delta, batch_shape=(REPLICATES,),
        dtype=dtype,
    )  # fmt: skip
    every, missed = torch.arange(REPLICATES), torch.zeros(REPLICATES, dtype=torch.bool)
    arms, theta = arms.to(dtype), theta.to(dtype)
    for t in range(horizon):
        if name not in EXACT:
            region = policy.confidence_set()
            assert region.delta == (None if name in UNNAMED else delta)
            slack = shrink * region.gamma - (region.gamma - region.slack(theta))
            missed |= slack < 0
        elif t % 10 == 9:
            missed |= ~policy.confidence_set().contains(theta * (1 - torch.finfo(dtype).eps))
        x = arms[every, policy.select(arms)]
        z = (x * theta).sum(-1)
        r = family.sample(z, generator) if rewards is None else rewards(family.mean(z), generator)
        policy.update(x, r.to(dtype))
    return int(missed.sum())


def check(misses, delta):
    test = scipy.stats.binomtest(misses, REPLICATES, delta, alternative="greater")
    assert test.pvalue >= 0.05, f"{misses} of {REPLICATES} missed: significantly above {delta}"


@pytest.mark.parametrize(("name", "world"), CASES)
def test_coverage(name, world):
    family, S = EVERY[world]
    check(count_misses(name, family, S), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.05, 0.5])
@pytest.mark.parametrize("dim", [1, 8, 20])
@pytest.mark.parametrize(("name", "world"), CASES)
def test_coverage_in_other_dimensions(name, world, dim, delta):
    family, S = EVERY[world]
    check(count_misses(name, family, S, dim=dim, delta=delta, size=0.7), delta)


@pytest.mark.parametrize("name", EXACT)
def test_coverage_of_likelihood_ratio_sets(name):
    check(count_misses(name, glb.Bernoulli(), 3.0, delta=0.5, horizon=60), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.05, 0.5])
@pytest.mark.parametrize("dim", [1, 8])
@pytest.mark.parametrize("world", BOUNDED)
@pytest.mark.parametrize("name", EXACT)
def test_coverage_of_likelihood_ratio_sets_in_other_dimensions(name, world, dim, delta):
    family, S = BOUNDED[world]
    check(count_misses(name, family, S, dim=dim, delta=delta), delta)


def part_of_one(mean, generator):
    """Rewards in [0, 1] of the given mean that are not binary: uniform about it."""
    width = torch.minimum(mean, 1 - mean)
    u = torch.rand(mean.shape, generator=generator, dtype=torch.float64)
    return mean + width * (2 * u - 1)


@pytest.mark.parametrize(
    "name", [*ONE_PASS, "gloc", "ada-ofu-ecolog", "ol2m", "glm-ucb", "log-ucb-1"]
)
def test_coverage_of_rewards_that_are_not_binary(name):
    check(count_misses(name, glb.Bernoulli(), 3.0, rewards=part_of_one, delta=0.5), 0.5)


@pytest.mark.parametrize("name", [*ONE_PASS, "ada-ofu-ecolog", "glm-ucb", "log-ucb-1"])
def test_coverage_in_float32(name):
    check(count_misses(name, glb.Bernoulli(), 4.0, dtype=torch.float32, delta=0.5), 0.5)


@pytest.mark.parametrize("name", ["glb-omd-rows", "ada-ofu-ecolog"])
def test_a_wrong_radius_is_found_out(name):
    misses = count_misses(name, glb.Bernoulli(), 4.0, shrink=1 / 50)
    with pytest.raises(AssertionError, match="significantly above"):
        check(misses, 0.05)


@pytest.mark.parametrize("name", ["gloc", "glm-ucb", "log-ucb-1", "ofulog-r"])
def test_constants_do_not_mix(name):
    proven, public = (
        policies.make(name, family=glb.Bernoulli(), domain=glb.Ball(2, 2.0), constants=constants)
        for constants in ("proven", "public")
    )
    with pytest.raises(
        glb.InputError, match=r"state\['settings'\]\['constants'\]: expected 'public'"
    ):
        public.load_state_dict(proven.state_dict())


def test_public_constants_promise_nothing():
    for name in ("gloc", "ada-ofu-ecolog"):
        policy = policies.make(
            name, family=glb.Bernoulli(), domain=glb.Ball(2, 2.0), constants="public"
        )
        assert policy.confidence_set().event is None
    poisson = policies.make("gloc", family=glb.Poisson(), domain=glb.Ball(2, 2.0))
    assert poisson.confidence_set().event is None


# ---- the weights of rows -------------------------------------------------------------------------

PARTITIONS = {
    "bernoulli": (glb.Bernoulli(), lambda z: mpmath.log1p(mpmath.exp(z))),
    "gaussian": (glb.Gaussian(0.5), lambda z: z * z / 2),
    "poisson": (glb.Poisson(), mpmath.exp),
    "probit": (glb.QuasiBounded("probit"), lambda z: z * mpmath.ncdf(z) + mpmath.npdf(z)),
}


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("end", [0.1, 2.0, 6.0])
def test_chord_curvature_is_the_least_over_the_interval(name, end):
    family, m = PARTITIONS[name]
    z = torch.tensor([-1.0, -0.7, 0.0, 0.3, 0.99999, 1.0], dtype=torch.float64) * end
    limits = torch.full_like(z, end)
    R = torch.full_like(z, family.self_concordance(end))
    found = chord_curvature(family, z, limits, R)
    with mpmath.workdps(40):
        for at, weight in zip(map(mpmath.mpf, z.tolist()), found.tolist(), strict=True):
            slope = mpmath.diff(m, at)
            points = [mpmath.mpf(end) * k / 60 for k in range(-60, 61)]
            chords = [
                2 * (m(y) - m(at) - slope * (y - at)) / (y - at) ** 2
                for y in points
                if abs(y - at) > 1e-9
            ]
            # chords that shrink to a point have its curvature
            least = min(*chords, mpmath.diff(m, at, 2)) / mpmath.mpf(family.dispersion)
            assert weight <= least * (1 + mpmath.mpf(10) ** -12)
            assert weight >= least * (1 - 1e-6)


def test_chord_curvature_of_an_unknown_family_is_a_bound():
    family = glb.CustomFamily(
        lambda z: torch.nn.functional.softplus(z), reward_range=(0.0, 1.0), self_concordance=1.0,
        max_variance=0.25, min_variance=lambda S: float(glb.Bernoulli().min_variance(S)),
    )  # fmt: skip
    z = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64)
    end, one = torch.full_like(z, 2.0), torch.ones_like(z)
    exact = chord_curvature(glb.Bernoulli(), z, end, one)
    bound = chord_curvature(family, z, end, one)
    assert bool((bound <= exact * (1 + 1e-12)).all() & (bound > 0.2 * exact).all())
    policy = policies.make("glb-omd-rows", family=family, domain=glb.Ball(2, 2.0))
    policy.update([0.6, 0.8], 1.0)
    assert bool(torch.isfinite(policy.squared_radius()))


def test_mixed_loss_is_that_of_the_normal_law():
    """The discrete law of the proof is close to the normal one that it stands for."""
    policy = policies.make("glb-omd-rows", family=glb.Bernoulli(), domain=glb.Ball(2, 4.0))
    z, v = torch.tensor([-3.0, 0.0, 2.0]).double(), torch.tensor([1.0, 0.3, 0.05]).double()
    found = policy._descent._mixed_loss(z, v, torch.ones(3).double())
    for at, variance, value in zip(z.tolist(), v.tolist(), found.tolist(), strict=True):
        deviation = mpmath.sqrt(variance)
        density = lambda t: mpmath.npdf(t) / (1 + mpmath.exp(-(at + deviation * t)))  # noqa: E731, B023
        assert value == pytest.approx(
            float(-mpmath.log(mpmath.quad(density, [-12, 0, 12]))), abs=1e-7
        )
