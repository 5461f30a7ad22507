"""The baselines: the contract, and what each claims beyond it."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from torchglb import policies
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import Bernoulli, Binomial, Gaussian, Poisson, QuasiBounded
from torchglb.policies.rank_one import LIFETIME, RankOneInverse
from torchglb.testing.policies import PolicyContract, World, rows_of, unit_arms

DTYPE = torch.float64
ALL = (Bernoulli(), Gaussian(0.5), Poisson())
UNBOUNDED = (Gaussian(0.5), Poisson())


class TestEVILL(PolicyContract):
    name = "evill"
    families = ALL


@pytest.mark.slow
class TestEVILLAggregated(PolicyContract):
    name = "evill"
    families = ALL
    options = {"aggregate": True}


class TestEVILLTheory(PolicyContract):
    name = "evill-theory"
    ball_arms = False
    families = ALL
    greedy = False


class TestEVILLTheoryWithoutWarmUp(PolicyContract):
    name = "evill-theory"
    ball_arms = False
    families = ALL
    options = {"level": 10.0}


class TestRSGLinCB(PolicyContract):
    name = "rs-glincb"
    ball_arms = False
    families = (Bernoulli(), Binomial(3), QuasiBounded("probit"))
    uncovered = UNBOUNDED


class TestRSGLinCBAfterTheWarmUp(PolicyContract):
    name = "rs-glincb"
    ball_arms = False
    options = {"scale": 0.004}
    greedy = False


@pytest.mark.slow
class TestRSGLinCBBetween(PolicyContract):
    name = "rs-glincb"
    ball_arms = False
    options = {"scale": 0.0075}  # long arms are still new, short ones are not
    greedy = False


class TestAdaOFUECOLog(PolicyContract):
    name = "ada-ofu-ecolog"
    uncovered = UNBOUNDED


@pytest.mark.slow
class TestAdaOFUECOLogPublic(PolicyContract):
    name = "ada-ofu-ecolog"
    options = {"constants": "public"}


class TestGLBOMD(PolicyContract):
    name = "glb-omd"
    families = ALL


class TestGLBOMDRealised(PolicyContract):
    name = "glb-omd-realised"
    families = (*ALL, QuasiBounded("probit"))


class TestGLBOMDRows(PolicyContract):
    name = "glb-omd-rows"
    families = (*ALL, QuasiBounded("cloglog"))
    options = {"regularization": 0.5}


class TestGLMUCB(PolicyContract):
    name = "glm-ucb"
    ball_arms = False
    families = (Bernoulli(), Binomial(3))
    uncovered = UNBOUNDED


@pytest.mark.slow
class TestGLMUCBPublic(PolicyContract):
    name = "glm-ucb"
    options = {"constants": "public"}
    ball_arms = False


class TestGLOC(PolicyContract):
    name = "gloc"
    families = ALL


@pytest.mark.slow
class TestGLOCPublic(PolicyContract):
    name = "gloc"
    options = {"constants": "public"}
    families = ALL


class TestLogUCB1(PolicyContract):
    name = "log-ucb-1"
    ball_arms = False
    uncovered = UNBOUNDED


@pytest.mark.slow
class TestLogUCB1Public(PolicyContract):
    name = "log-ucb-1"
    options = {"constants": "public"}
    ball_arms = False


class TestOL2M(PolicyContract):
    name = "ol2m"
    uncovered = UNBOUNDED


class TestOFUL(PolicyContract):
    name = "oful"
    families = (Gaussian(0.5),)
    uncovered = (Bernoulli(), Poisson())


class TestThompsonSampling(PolicyContract):
    name = "ts"
    families = ALL


class TestGreedy(PolicyContract):
    name = "greedy"
    families = ALL


class TestRandom(PolicyContract):
    name = "random"
    families = ALL
    greedy = False


class TestOracle(PolicyContract):
    name = "oracle"
    families = ALL
    options = {"theta_star": [1.0]}


# ---- what each claims beyond the contract --------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name, radius=2.0, dim=2, family=None, **options):
    settings = {"delta": 0.05, "horizon": 500} | options
    family = Bernoulli() if family is None else family
    return policies.make(name, family=family, domain=Ball(dim, radius), **settings)


def assert_covariance(samples, expected):
    """Entries of a sample covariance within five standard deviations of their sampling law."""
    count = samples.shape[0]
    found = samples.mT @ samples / count  # the mean is known to be 0
    variance = torch.diagonal(expected)
    spread = ((variance[:, None] * variance + expected.square()) / count).sqrt()
    assert bool(((found - expected).abs() <= 5 * spread).all()), (found, expected)
    mean = samples.mean(0)
    assert bool((mean.abs() <= 5 * (variance / count).sqrt()).all())


@pytest.mark.parametrize("family", ALL, ids=["bernoulli", "gaussian", "poisson"])
def test_perturbation_of_evill_has_the_covariance_of_the_paper(family):
    N, n, d, a, lam = 20_000, 15, 3, 1.3, 0.7
    policy = make(
        "evill", dim=d, family=family, batch_shape=(N,), scale=a, regularization=lam, seed=5
    )
    X = unit_arms(n, d, seed=4)
    r = torch.arange(n, dtype=DTYPE) % 2
    policy.update(X.expand(N, n, d), r.expand(N, n))
    theta = policy.fit().theta
    weights = family.variance(X @ theta[0]) / family.dispersion
    expected = a**2 * (lam * torch.eye(d, dtype=DTYPE) + (X.mT * weights) @ X)
    assert_covariance(policy.perturbation(), expected)
    # numbers that are never multiplied by the arms would have another covariance
    faulty = a**2 * (lam + weights.sum() / d) * torch.eye(d, dtype=DTYPE)
    with pytest.raises(AssertionError):
        assert_covariance(policy.perturbation(), faulty)


def test_thompson_sampling_draws_from_the_laplace_posterior():
    N, n, d = 20_000, 15, 3
    policy = make("ts", dim=d, batch_shape=(N,), scale=1.3, seed=6)
    X = unit_arms(n, d, seed=4)
    policy.update(X.expand(N, n, d), (torch.arange(n, dtype=DTYPE) % 2).expand(N, n))
    fit = policy.fit()
    assert_covariance(policy.sample() - fit.theta, 1.3**2 * torch.linalg.inv(fit.hessian[0]))


@pytest.mark.parametrize("name", ["evill", "ts", "evill-theory", "random"])
def test_draws_change_from_choice_to_choice_and_with_the_seed(name):
    arms = unit_arms(200, 8, 2)
    options = {"level": 10.0} if name == "evill-theory" else {}
    policy = make(name, batch_shape=(200,), **options)
    first, second = policy.select(arms), policy.select(arms)
    other = make(name, batch_shape=(200,), seed=1, **options).select(arms)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(make(name, batch_shape=(200,), **options).select(arms), first)


def test_random_choice_is_uniform():
    N, K = 7000, 7
    policy = make("random", batch_shape=(N,))
    counts = torch.bincount(policy.select(unit_arms(N, K, 2)), minlength=K)
    assert counts.shape == (K,)
    spread = math.sqrt(N / K * (1 - 1 / K))
    assert bool(((counts - N / K).abs() < 4.5 * spread).all())


@pytest.mark.parametrize("name", ["gloc", "ol2m", "ada-ofu-ecolog"])
@pytest.mark.parametrize("radius", [0.2, 1.0, 5.0])
def test_online_estimates_stay_in_the_ball(name, radius):
    B, T, d = 16, 60, 3
    policy = make(name, radius, d, batch_shape=(B,))
    X = unit_arms(T, B, d, seed=8)
    # half of the replicates see rewards that always push outwards
    r = (X[..., 0] > 0).to(DTYPE)
    r[:, ::2] = (torch.rand((T, B // 2), generator=torch.Generator().manual_seed(1)) < 0.5).to(
        DTYPE
    )
    largest = 0.0
    for t in range(T):
        policy.update(X[t], r[t])
        norm = torch.linalg.vector_norm(policy.theta, dim=-1)
        assert bool((norm <= radius * (1 + 1e-12)).all())
        largest = max(largest, float(norm.max()))
    if radius == 0.2:
        assert largest > radius * (1 - 1e-9)  # the ball was reached


@pytest.mark.parametrize("name", ["gloc", "ol2m", "ada-ofu-ecolog"])
def test_estimates_inside_the_ball_are_left_alone(name):
    # public code moves every iterate of GLOC onto the sphere
    policy = make(name, 3.0)
    policy.update([0.1, 0.05], 1.0)
    norm = float(torch.linalg.vector_norm(policy.theta))
    assert 0.0 < norm < 0.5 * 3.0


def test_projection_is_in_the_norm_of_the_matrix():
    # the radial point of the same direction is farther away in that norm
    policy = make("gloc", 0.2, 2)
    for x, r in [([1.0, 0.0], 1.0)] * 6 + [([0.6, 0.8], 1.0)]:
        before = policy.theta.clone()
        x = torch.tensor(x, dtype=DTYPE)
        policy.update(x, r)
    V = 2 * torch.eye(2, dtype=DTYPE) + torch.diag(torch.tensor([6.0, 0.0], dtype=DTYPE))
    V = V + torch.outer(x, x)
    slope = torch.sigmoid(x @ before) - r
    free = before - slope * torch.linalg.solve(V, x) / Bernoulli().min_variance(0.2)
    assert float(torch.linalg.vector_norm(free)) > 0.2

    def distance(point):
        return float((point - free) @ V @ (point - free))

    angles = torch.linspace(0, 2 * math.pi, 20_001, dtype=DTYPE)
    sphere = 0.2 * torch.stack([angles.cos(), angles.sin()], -1)
    away = sphere - free
    least = float(((away @ V) * away).sum(-1).min())
    assert distance(policy.theta) <= least + 1e-12
    assert distance(0.2 * free / torch.linalg.vector_norm(free)) > distance(policy.theta) + 1e-5


@pytest.mark.parametrize("name", ["gloc", "ol2m", "ada-ofu-ecolog", "oful"])
def test_online_policies_keep_no_history(name):
    family = Gaussian(0.5) if name == "oful" else Bernoulli()

    def size(state):
        if isinstance(state, torch.Tensor):
            return state.numel()
        return sum(map(size, state.values())) if isinstance(state, dict) else 1

    policy = make(name, family=family)
    sizes = set()
    for row in unit_arms(30, 2):
        policy.update(row, 1.0)
        sizes.add(size(policy.state_dict() | {"settings": 1}))
    assert len(sizes) == 1
    assert max(sizes) < 40


@pytest.mark.parametrize("name", ["oful", "gloc", "ol2m", "ada-ofu-ecolog"])
def test_ellipsoids_cover(name):
    B, T = 80, 120
    family = Gaussian(0.5) if name == "oful" else Bernoulli()
    policy = make(name, family=family, batch_shape=(B,), delta=0.1)
    world = World(family, T, B, 4, 2, 2.0, seed=21)
    missed = torch.zeros(B, dtype=torch.bool)
    for t in range(T):
        index = policy.select(world.arms[t])
        policy.update(*(v[:, 0] for v in rows_of(world, index[None], t)))
        shape = policy.state_dict()["state"]["V"]["matrix"]
        centre = policy.theta if name == "oful" else policy.centre
        away = world.theta - centre
        square = policy.radius().square() if name == "oful" else policy.squared_radius()
        missed |= (away * (shape @ away[..., None])[..., 0]).sum(-1) > square
    # the chance of more misses than this, if each replicate misses with probability 0.1
    assert scipy.stats.binom.sf(int(missed.sum()) - 1, B, 0.1) > 1e-3


# ---- RS-GLinCB -----------------------------------------------------------------------------------


def eliminating_policy():
    """After a warm-up that has left theta_o well known."""
    policy = make("rs-glincb", scale=0.1, horizon=1, delta=0.9)  # a small ridge
    generator = torch.Generator().manual_seed(3)
    X = unit_arms(160, 2, seed=9)
    X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    theta = torch.tensor([1.2, -1.4], dtype=DTYPE)
    policy.update(X, Bernoulli().sample(X @ theta, generator))
    return policy


def test_elimination_is_by_the_largest_lower_bound():
    policy = eliminating_policy()
    angles = torch.linspace(0, 2 * math.pi, 13, dtype=DTYPE)[:-1]
    arms = torch.stack([angles.cos(), angles.sin()], -1) * 0.9
    assert not bool(policy.warming_up(arms))
    kept = policy.kept(arms)
    state = policy.state_dict()["state"]
    centre = arms @ state["theta_o"]
    kappa = 1 / Bernoulli().min_variance(2.0)
    spread = torch.linalg.inv(state["V"]["matrix"])
    width = float(policy.gamma) * math.sqrt(kappa) * ((arms @ spread) * arms).sum(-1).sqrt()
    upper, lower = centre + width, centre - width
    assert torch.equal(kept, upper >= lower.max())
    assert 0 < int(kept.sum()) < 12
    # the faulty variants keep other sets: by the smallest lower bound, or by each arm's own
    assert not torch.equal(kept, upper >= lower.min())
    assert not torch.equal(kept, upper >= lower)
    # the choice is the best of what is kept, though an eliminated arm may score higher
    scores = policy.scores(arms)
    choice = int(policy.select(arms))
    assert bool(kept[choice])
    assert float(scores[choice]) == float(scores[kept].max())


def test_eliminated_arms_are_not_played_whatever_their_score():
    policy = eliminating_policy()
    state = policy.state_dict()["state"]
    best = state["theta_o"] / torch.linalg.vector_norm(state["theta_o"])
    # the worst arm, longer than the others and so with the largest bonus
    arms = torch.stack([0.3 * best, -1.0 * best, 0.4 * best])
    scores, kept = policy.scores(arms), policy.kept(arms)
    assert int(scores.argmax()) == 1
    assert not bool(kept[1])
    assert int(policy.select(arms)) != 1


def test_switches_are_rare_after_the_warm_up():
    T, B, d = 1500, 3, 2
    policy = make("rs-glincb", scale=0.01, horizon=T, batch_shape=(B,))
    world = World(Bernoulli(), T, B, 5, d, 2.0, seed=2)
    seen, theta = [], policy.state_dict()["state"]["theta_tau"]
    for t in range(T):
        before = policy.switches.clone()
        index = policy.select(world.arms[t])
        policy.update(*(v[:, 0] for v in rows_of(world, index[None], t)))
        changed = (policy._theta_tau != theta).any(-1)
        assert torch.equal(changed, policy.switches != before)  # refitted at switches only
        theta = policy._theta_tau.clone()
        seen.append(policy.switches.clone())
    assert bool((policy.warm_up_rounds > 0).all())
    assert bool((policy.warm_up_rounds < T / 2).all())
    # every switch doubles det H, and det H <= (lambda + sum of m''/e over d)^d
    lam = d * math.log(T / 0.05)
    bound = d * math.log2(1 + 0.25 * T / (math.e * d * lam))
    assert bool((policy.switches >= 2).all())
    assert bool((policy.switches <= bound).all())
    assert bound <= math.log(T) ** 2


@pytest.mark.slow
def test_switches_grow_no_faster_than_the_square_of_log_T():
    horizons, B = (500, 2000, 8000), 8
    switches, warm_up = [], []
    for T in horizons:
        policy = make("rs-glincb", scale=0.01, horizon=T, batch_shape=(B,))
        world = World(Bernoulli(), T, B, 5, 2, 2.0, seed=2)
        for t in range(T):
            index = policy.select(world.arms[t])
            policy.update(*(v[:, 0] for v in rows_of(world, index[None], t)))
        warm_up.append(policy.warm_up_rounds.double())
        switches.append(policy.switches.double())
    count, warm = torch.stack(switches), torch.stack(warm_up)  # (horizons, B)
    squared_log = torch.tensor(horizons, dtype=DTYPE).log().square()[:, None]
    # the warm-up ends early, so that nearly all rounds could switch
    assert bool((warm[-1] < 0.02 * horizons[-1]).all())
    assert bool((count <= squared_log).all())
    # 4 T rounds multiply det H by 4^d at most: 2 d further switches, and 1 that was about to come
    more = count[1:] - count[:-1]
    assert bool((more >= 1).all())  # it does learn on
    assert bool((more <= 2 * 2 + 1).all())
    # nor does the warm-up, which refits as well, grow faster than the square of log T
    assert bool(((warm / squared_log)[1:] <= (warm / squared_log)[:-1]).all())


def test_warm_up_plays_the_least_known_arm_and_lasts_with_theory_constants():
    policy = make("rs-glincb")
    arms = unit_arms(6, 2)
    for _ in range(20):
        assert bool(policy.warming_up(arms))
        V = policy.state_dict()["state"]["V"]["matrix"]
        norms = ((arms @ torch.linalg.inv(V)) * arms).sum(-1)
        index = policy.select(arms)
        assert int(index) == int(norms.argmax())
        policy.update(arms[index], 1.0)
    assert int(policy.warm_up_rounds) == 20
    assert int(policy.switches) == 0


# ---- EVILL's warm-up -----------------------------------------------------------------------------


def test_warm_up_of_evill_draws_from_the_design():
    N = 6000
    policy = make("evill-theory", batch_shape=(N,))
    arms = unit_arms(5, 2, seed=3).expand(N, 5, 2)
    assert bool(policy.warming_up(arms).all())
    counts = torch.bincount(policy.select(arms), minlength=5).to(DTYPE)
    weights = policy.design(arms)[0]
    spread = (N * weights * (1 - weights)).sqrt()
    assert bool(((counts - N * weights).abs() <= 4.5 * spread + 1e-9).all())
    assert bool((counts[weights == 0] == 0).all())
    assert 2 <= int((weights > 0).sum()) <= 3


def test_warm_up_of_evill_ends_when_every_arm_is_known():
    policy = make("evill-theory", level=0.03)
    arms = unit_arms(5, 2, seed=3)
    lengths = []
    for t in range(400):
        if not bool(policy.warming_up(arms)):
            break
        index = policy.select(arms)
        policy.update(arms[index], float(t % 2))
        V = policy.regularization * torch.eye(2, dtype=DTYPE)
        X = policy.history.X
        V = V + X.mT @ X
        lengths.append(float(((arms @ torch.linalg.inv(V)) * arms).sum(-1).max()))
    assert len(lengths) < 400
    assert lengths[-1] <= 0.03 < lengths[-2]
    theta = policy.perturbed(policy.perturbation())
    torch.testing.assert_close(policy.scores(arms), arms @ theta)


# ---- regret --------------------------------------------------------------------------------------


def regret(name, family, T=240, B=16, **options):
    """The mean regret of the first and of the second half, over random directions of theta*."""
    world = World(family, 1, B, 8, 2, 2.0, fixed=True, seed=13)
    generator = torch.Generator().manual_seed(17)
    arms = world.arms[0]
    z = (arms @ world.theta[..., None])[..., 0]
    means = family.mean(z)
    policy = make(name, family=family, batch_shape=(B,), horizon=T, seed=1, **options)
    total = torch.zeros(T, dtype=DTYPE)
    for t in range(T):
        index = policy.select(arms)[:, None]
        played = arms.gather(-2, index[..., None].expand(B, 1, 2))[:, 0]
        policy.update(played, family.sample(z.gather(-1, index)[:, 0], generator))
        total[t] = (means.amax(-1) - means.gather(-1, index)[:, 0]).mean()
    return float(total[: T // 2].sum()), float(total[T // 2 :].sum())


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("evill", family) for family in ALL),
        *(("ts", family) for family in ALL),
        ("oful", Gaussian(0.5)),
        ("gloc", Gaussian(0.5)),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_regret_is_sublinear(name, family):
    options = {"aggregate": True} if name in ("evill", "ts") else {}
    early, late = regret(name, family, **options)
    at_random = sum(regret("random", family))
    assert late < 0.5 * early
    assert early + late < 0.25 * at_random


@pytest.mark.parametrize(
    ("name", "T", "options"),
    [
        pytest.param("ada-ofu-ecolog", 1500, {}, marks=pytest.mark.slow),
        pytest.param("gloc", 4000, {}, marks=pytest.mark.slow),
        pytest.param("glm-ucb", 1000, {"aggregate": True}, marks=pytest.mark.slow),
        pytest.param("log-ucb-1", 1000, {"aggregate": True}, marks=pytest.mark.slow),
    ],
)
def test_regret_of_wide_sets_falls_later(name, T, options):
    early, late = regret(name, Bernoulli(), T=T, **options)
    assert late < 0.75 * early


def test_regret_of_the_references():
    theta = World(Bernoulli(), 1, 16, 8, 2, 2.0, fixed=True, seed=13).theta
    assert regret("oracle", Bernoulli(), T=5, theta_star=theta) == (0.0, 0.0)
    early, late = regret("random", Bernoulli())
    assert late > 0.9 * early  # linear


# ---- refusals ------------------------------------------------------------------------------------


def test_horizon_and_theta_star_are_needed_where_they_are():
    for name in ("rs-glincb", "evill-theory"):
        with pytest.raises(InputError, match="horizon"):
            make(name, horizon=None)
    with pytest.raises(InputError, match="theta_star"):
        make("oracle")
    with pytest.raises(InputError, match="theta_star"):
        make("oracle", theta_star=[1.0, 2.0, 3.0])


@pytest.mark.parametrize("option", ["scale", "regularization"])
@pytest.mark.parametrize("name", ["evill", "ts"])
def test_options_are_checked(name, option):
    with pytest.raises(InputError, match=option):
        make(name, **{option: 0.0})
    with pytest.raises(InputError, match=option):
        make("glm-ucb", **{option: 1.0})


def test_families_whose_curvature_vanishes_are_refused():
    for name in ("glm-ucb", "rs-glincb", "gloc", "evill-theory"):
        with pytest.raises(InputError, match=name):
            make(name, 40.0, family=QuasiBounded("probit"))


# ---- the rank-one inverse ------------------------------------------------------------------------


def test_rank_one_inverse_follows_the_matrix():
    A = RankOneInverse.scaled_identity(0.5, (2, 3), 4, torch.zeros(0, dtype=DTYPE))
    expected = 0.5 * torch.eye(4, dtype=DTYPE).expand(2, 3, 4, 4)
    rows = unit_arms(LIFETIME + 40, 2, 3, 4, seed=1)
    for i, x in enumerate(rows):
        w = torch.full((2, 3), 0.1 * (i % 3), dtype=DTYPE)
        A.add(x, w)
        expected = expected + w[..., None, None] * x[..., :, None] * x[..., None, :]
        if i % 50 == 0:
            torch.testing.assert_close(
                A.inverse, torch.linalg.inv(expected), rtol=1e-10, atol=1e-12
            )
            torch.testing.assert_close(A.logdet, torch.logdet(expected), rtol=0, atol=1e-10)
    torch.testing.assert_close(A.matrix, expected)
    x = rows[0]
    torch.testing.assert_close(A.solve(x), torch.linalg.solve(expected, x))
    norms = (x * torch.linalg.solve(expected, x)).sum(-1).sqrt()
    torch.testing.assert_close(A.norms(x[..., None, :])[..., 0], norms)


def test_rank_one_inverse_of_many_rows_at_once():
    one, many = (
        RankOneInverse.scaled_identity(2.0, (3,), 2, torch.zeros(0, dtype=DTYPE)) for _ in range(2)
    )
    X, w = unit_arms(3, 5, 2), torch.linspace(0, 1, 15, dtype=DTYPE).reshape(3, 5)
    many.add_rows(X, w)
    for i in range(5):
        one.add(X[:, i], w[:, i])
    torch.testing.assert_close(one.inverse, many.inverse)
    torch.testing.assert_close(one.logdet, many.logdet)


def test_drift_is_seen_and_repaired_where_it_is():
    A = RankOneInverse(torch.eye(2, dtype=DTYPE).expand(2, 2, 2))
    A.inverse = A.inverse + torch.tensor([1e-6, 0.0], dtype=DTYPE)[:, None, None]
    A.add(torch.tensor([[0.6, 0.8]] * 2, dtype=DTYPE))
    torch.testing.assert_close(A.inverse, torch.linalg.inv(A.matrix), rtol=0, atol=1e-15)


def test_drift_does_not_grow_over_badly_scaled_updates():
    A = RankOneInverse.scaled_identity(1e-6, (), 3, torch.zeros(0, dtype=DTYPE))
    for x in unit_arms(2000, 3, seed=5):
        A.add(x)
    exact = torch.linalg.inv(A.matrix)
    assert float((A.inverse - exact).norm() / exact.norm()) < 1e-11


@pytest.mark.parametrize(("name", "share"), [("oful", 1.0), ("oful-contrast", 0.1)])
def test_bounds_of_oful_in_float32(name, share):
    """Above the formula over the same rows: V in float32 lost a hundredth and more of its least."""
    generator = torch.Generator().manual_seed(1)
    arms = torch.nn.functional.normalize(torch.randn((3, 4), generator=generator), dim=-1)
    policy = policies.make(name, family=Gaussian(), domain=Ball(4, 1.0), dtype=torch.float32)
    r = torch.randn(3000, generator=generator)
    for s in range(3000):
        policy.update(arms[0], r[s])
    X = arms[0].double().expand(3000, 4)
    V = torch.eye(4, dtype=DTYPE) + X.mT @ X
    theta, growth = torch.linalg.solve(V, X.mT @ r.double()), torch.linalg.slogdet(V)[1]
    radius = (2 * math.log(1 / (0.05 * share)) + growth).sqrt() + 1.0
    queries = torch.cat([arms, torch.eye(4)])
    exact = queries.double()
    width = radius * (exact * torch.linalg.solve(V, exact.mT).mT).sum(-1).sqrt()
    found = policy.confidence_set().interval(queries)
    assert bool((found.upper.double() >= exact @ theta + width).all())
    assert bool((found.lower.double() <= exact @ theta - width).all())
    assert bool((policy.scores(queries).double() >= exact @ theta + width).all())
    assert bool((found.upper.double() <= exact @ theta + 1.001 * width + 1e-5).all())


@pytest.mark.parametrize(
    "name", ["gloc", "glb-omd", "glb-omd-realised", "glb-omd-rows", "ada-ofu-ecolog", "ol2m"]
)
def test_online_bounds_in_float32(name):
    """Above those of float64 from the same rows, of which the sums in float32 lost digits."""
    generator = torch.Generator().manual_seed(1)
    arms = torch.nn.functional.normalize(torch.randn((3, 3), generator=generator), dim=-1)
    wide, narrow = (
        policies.make(name, family=Bernoulli(), domain=Ball(3, 1.0), dtype=dtype)
        for dtype in (DTYPE, torch.float32)
    )
    x = arms[torch.tensor([0, 0, 0, 1])].repeat(60, 1)
    r = torch.randint(0, 2, (240,), generator=generator)
    for policy in (wide, narrow):
        policy.update(x.to(policy.dtype), r)
    queries = torch.cat([arms, torch.eye(3)])
    found, exact = (
        policy.confidence_set().interval(queries.to(policy.dtype)) for policy in (narrow, wide)
    )
    scores = narrow.scores(arms).double() - wide.scores(arms.double())
    for excess in (found.upper.double() - exact.upper, exact.lower - found.lower.double(), scores):
        assert bool((excess >= 0.0).all())
        assert bool((excess <= 1e-4 * (1.0 + exact.upper.abs().amax())).all())


@pytest.mark.parametrize("name", ["glm-ucb", "log-ucb-1"])
def test_bounds_around_a_fit_in_float32(name):
    """Above those of float64 from the same rows: the design lost digits, as in OFUL."""
    generator = torch.Generator().manual_seed(0)
    arms = torch.nn.functional.normalize(torch.randn((3, 3), generator=generator), dim=-1)
    found = []
    r = torch.randint(0, 2, (2000,), generator=generator)
    for dtype in (torch.float32, DTYPE):
        policy = policies.make(name, family=Bernoulli(), domain=Ball(3, 2.0), dtype=dtype)
        for start in range(0, 2000, 10):
            x = (0.99 * arms[0]).expand(10, 3)
            policy.update(x.to(dtype), r[start : start + 10])
        found.append(policy.bounds((0.99 * arms[1]).to(dtype)))
    narrow, wide = found
    assert float(wide.upper) <= float(narrow.upper) <= float(wide.upper) * (1.0 + 1e-4)
    assert float(narrow.lower) <= float(wide.lower)
