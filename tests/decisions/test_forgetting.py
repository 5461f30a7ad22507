"""Forgetting and conservative play: sums, validity, constraints."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import pytest
import scipy.stats
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.decisions import Conservative, Discount, Window
from torchglb.errors import InputError
from torchglb.inference import RunningTest
from torchglb.radii import PACBayes
from torchglb.simulate import simulate
from torchglb.testing.policies import PolicyContract

F64 = torch.float64
KINDS = (Discount(0.98), Window(50))


def rows(n, batch=(), seed=0, d=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((*batch, n, d), generator=generator, dtype=F64)
    x = 0.99 * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    theta = torch.tensor([1.0, -0.5, 0.3], dtype=F64)[:d]
    return x, torch.bernoulli(torch.sigmoid(x @ theta), generator=generator)


def sequence_of(kind, batch=(), d=3, delta=0.05):
    return glb.ConfidenceSequence(
        glb.Bernoulli(), glb.Ball(d, 2.0), delta, batch_shape=batch, forgetting=kind
    )


def by_hand(kind, x, r):
    """The weighted loss of all rows, with the weights of the definition."""
    n = x.shape[-2]
    age = torch.arange(n - 1, -1, -1, dtype=F64)
    if isinstance(kind, Window):
        w = (age < kind.n).double()
    else:
        w = kind.gamma**age * (age < math.ceil(math.log(1e-3) / math.log(kind.gamma)))
    return glb.NegativeLogLikelihood(glb.Bernoulli(), x, r, w.expand(r.shape).contiguous())


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_carried_sums_are_those_of_a_pass(kind):
    x, r = rows(1500, (2,))
    sequence = sequence_of(kind, (2,))
    sequence.update(x[:, :40], r[:, :40])
    assert bool((sequence.history.anchor != 0).any())
    sequence.update(x[:, 40:], r[:, 40:])
    expected = by_hand(kind, x, r).expand(sequence.history.anchor)
    for carried, wanted in zip(sequence.history.carried(), expected, strict=True):
        torch.testing.assert_close(carried, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, Discount(0.999), Window(2000)], ids=repr)
def test_carried_sums_after_ten_thousand_rounds(kind):
    x, r = rows(10_000)
    sequence = sequence_of(kind)
    for i in range(0, 10_000, 100):
        sequence.update(x[i : i + 100], r[i : i + 100])
    expected = by_hand(kind, x, r).expand(sequence.history.anchor)
    for carried, wanted in zip(sequence.history.carried(), expected, strict=True):
        torch.testing.assert_close(carried, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_the_level_spends_delta_time_by_time(kind):
    x, r = rows(30)
    sequence = sequence_of(kind)
    sequence.update(x, r)
    plain = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, 2.0), 0.05)
    plain.update(x, r, sequence.history.w)
    expected = plain.current().level + math.log(31 * 32)
    torch.testing.assert_close(sequence.current().level, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_saved_and_copied_are_the_same_and_one_by_one_up_to_rounding(kind):
    """Rows that come together are carried together: fits start from sums in another order."""
    x, r = rows(90)
    whole, single = sequence_of(kind), sequence_of(kind)
    whole.update(x[:80], r[:80])
    for i in range(80):
        single.update(x[i], r[i])
    copied, loaded = copy.deepcopy(whole), sequence_of(kind)
    loaded.load_state_dict(whole.state_dict())
    for other in (whole, single, copied, loaded):
        other.update(x[80:], r[80:])
    for other in (copied, loaded):
        assert torch.equal(other.current().level, whole.current().level)
        assert torch.equal(other.current().center, whole.current().center)
    assert torch.equal(single.history.w, whole.history.w)
    for name in ("level", "center"):
        one, other = (getattr(found.current(), name) for found in (single, whole))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_asking_changes_nothing():
    x, r = rows(60)
    asked, silent = sequence_of(KINDS[0]), sequence_of(KINDS[0])
    for i in range(60):
        asked.update(x[i], r[i])
        asked.current()
        silent.update(x[i], r[i])
    assert torch.equal(asked.current().level, silent.current().level)


def test_refusals_leave_everything_as_it_was():
    sequence = sequence_of(KINDS[0])
    x, r = rows(5)
    sequence.update(x, r)
    before = sequence.state_dict()
    for bad in ((3.0 * x, r), (x, r + 5.0), (x[..., :2], r), (x, r[:3])):
        with pytest.raises(InputError, match="^[xr]:"):
            sequence.update(*bad)
    assert torch.equal(sequence.state_dict()["history"]["X"], before["history"]["X"])
    with pytest.raises(InputError, match="forgetting"):
        sequence_of(0.9)
    with pytest.raises(InputError, match="gamma"):
        Discount(1.5)
    with pytest.raises(InputError, match="state"):
        sequence_of(Window(7)).load_state_dict(before)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_theta_is_missed_no_more_often_than_promised(kind):
    runs, delta = 60, 0.2
    x, r = rows(120, (runs,), seed=3)
    sequence = sequence_of(kind, (runs,), delta=delta)
    theta = torch.tensor([1.0, -0.5, 0.3], dtype=F64).expand(runs, 3)
    missed = torch.zeros(runs, dtype=torch.bool)
    for i in range(0, 120, 20):
        sequence.update(x[:, i : i + 20], r[:, i : i + 20])
        missed |= ~sequence.current().contains(theta)
    hits = int(missed.sum())
    assert scipy.stats.binomtest(hits, runs, delta, alternative="greater").pvalue > 0.01


def test_forgetting_finds_the_new_best_arm_after_a_jump():
    arms = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=F64)
    settings = {"family": glb.Bernoulli(), "domain": glb.Ball(2, 3.0)}
    forgetful = policies.make("ofuglb-pb", forgetting=Window(60), **settings)
    faithful = policies.make("ofuglb-pb", aggregate=True, **settings)
    for policy in (forgetful, faithful):
        policy.update(arms[:1].expand(400, 2), torch.ones(400, dtype=F64))
        policy.update(arms[:1].expand(60, 2), torch.zeros(60, dtype=F64))
    assert int(forgetful.select(arms)) == 1
    assert int(faithful.select(arms)) == 0


def test_the_policy_is_saved_and_refuses_as_policies_do():
    settings = {"family": glb.Bernoulli(), "domain": glb.Ball(3, 2.0), "batch_shape": (2,)}
    first, second = (
        policies.make("ofuglb", **settings, forgetting={"discount": 0.9}) for _ in range(2)
    )
    x, r = rows(20, (2,))
    first.update(x, r)
    second.load_state_dict(first.state_dict())
    arms = rows(6, (2,), seed=9)[0]
    assert torch.equal(first.scores(arms), second.scores(arms))
    with pytest.raises(InputError, match="arms"):
        first.select(3.0 * arms)


# ---- the environment ---------------------------------------------------------------------------


def test_the_drifting_world_jumps_and_turns():
    settings = {"family": glb.Bernoulli(), "S": 4.0, "replicates": 3, "dim": 3, "seed": 5}
    jumping = environments.make("drifting", period=10, **settings)
    assert torch.equal(jumping.theta_at(0), jumping.theta_at(9))
    assert not torch.allclose(jumping.theta_at(9), jumping.theta_at(10))
    turning = environments.make("drifting", period=0, speed=0.1, **settings)
    for t in (0, 3, 57):
        length = torch.linalg.vector_norm(turning.theta_at(t), dim=-1)
        torch.testing.assert_close(length, torch.full_like(length, 3.0))
    cosine = (turning.theta_at(4)[:, :2] * turning.theta_at(5)[:, :2]).sum(-1)
    cosine = cosine / turning.theta_at(4)[:, :2].square().sum(-1)
    torch.testing.assert_close(cosine, torch.full_like(cosine, math.cos(0.1)))
    arms, index = jumping.arms(140), torch.zeros(3, dtype=torch.int64)
    z = (arms * jumping.theta_at(140)[:, None, :]).sum(-1)
    expected = torch.sigmoid(z).amax(-1) - torch.sigmoid(z)[:, 0]
    torch.testing.assert_close(jumping.regret(140, arms[:, 0], index), expected)


def test_nothing_is_certified_where_theta_changes():
    given = {"family": "bernoulli", "S": [3.0], "replicates": 2, "arms": 3, "period": 4}
    arrays = simulate(["ofuglb-pb"], "drifting", horizon=8, **given).arrays("ofuglb-pb")
    assert arrays["regret"].shape == (1, 2, 8)
    assert "certificate" not in arrays
    assert "missed" not in arrays


# ---- conservative play -------------------------------------------------------------------------


def played(runs, horizon, alpha, delta=0.1, conservative=True, seed=0, known=False):
    """The least surplus over the constraint, and the regret, of each run."""
    world = environments.make(
        "fixed", family=glb.Bernoulli(), S=3.0, replicates=runs, seed=seed, arms=6,
        shared_arms=False, theta="random",
    )  # fmt: skip
    inner = policies.make(
        "ofuglb-pb", family=glb.Bernoulli(), domain=world.domain, delta=delta,
        batch_shape=(runs,), aggregate=True,
    )  # fmt: skip
    x = world.arms(0)
    means = torch.sigmoid((x * world.theta_star[:, None, :]).sum(-1))
    baseline = means.argsort(-1)[:, 3]  # neither the best nor the worst
    mean = means.gather(-1, baseline[:, None])[:, 0]
    policy = (
        Conservative(inner, baseline, alpha, mean if known else None) if conservative else inner
    )
    earned, least, regret = (torch.zeros(runs, dtype=F64) for _ in range(3))
    least += math.inf
    for t in range(horizon):
        index = policy.select(x)
        policy.update(x[torch.arange(runs), index], world.rewards(t, x, index))
        earned += means.gather(-1, index[:, None])[:, 0] - (1.0 - alpha) * mean
        least = torch.minimum(least, earned)
        regret += world.regret(t, x, index)
    return least, regret, policy


@pytest.mark.parametrize("known", [False, True])
def test_the_constraint_holds_in_every_round(known):
    least, _, policy = played(10, 80, alpha=0.2, known=known)
    assert bool((least >= 0).all())
    assert bool((policy.budget >= 0).all())


def test_without_the_leash_the_constraint_is_broken():
    least, _, _ = played(10, 80, alpha=0.2, conservative=False)
    assert bool((least < 0).any())


@pytest.mark.slow
def test_the_constraint_holds_in_200_runs():
    least, _, _ = played(200, 120, alpha=0.15)
    assert bool((least >= 0).all())


def test_it_leaves_the_baseline_once_that_is_safe():
    arms = torch.tensor([[0.1, 0.0], [1.0, 0.0]], dtype=F64)
    inner = policies.make("ofuglb-pb", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0))
    safe = Conservative(inner, 0, 0.3)
    assert int(safe.select(arms)) == 0
    inner.update(arms[1:].expand(300, 2), torch.ones(300, dtype=F64))
    assert int(safe.select(arms)) == 1


def test_a_changing_arm_set_keeps_what_was_earned_and_states_continue():
    inner = policies.make("ofuglb-pb", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0))
    safe = Conservative(inner, 0, 0.5)
    generator = torch.Generator().manual_seed(0)
    arms = [0.6 * torch.rand((3, 2), generator=generator, dtype=F64) for _ in range(12)]
    budgets = []
    for x in arms[:6]:
        index = safe.select(x)
        safe.update(x[index], 1.0)
        budgets.append(float(safe.budget))
    assert min(budgets) >= 0.0
    other = Conservative(copy.deepcopy(inner), 0, 0.5)
    other.load_state_dict(safe.state_dict())
    for x in arms[6:]:
        index = safe.select(x)
        assert torch.equal(other.select(x), index)
        for policy in (safe, other):
            policy.update(x[index], 1.0)
    assert torch.equal(safe.budget, other.budget)


@pytest.mark.parametrize("mean", [None, 0.6])
def test_the_ledger_of_a_replicate_hangs_on_its_own_arms(mean):
    """Where those of a companion changed it was closed, with the bounds of that time."""
    given = {"family": glb.Bernoulli(), "domain": glb.Ball(2, 3.0)}
    alone, both = (
        Conservative(policies.make("ofuglb-pb", **given, batch_shape=shape), 0, 0.3, mean)
        for shape in ((), (2,))
    )
    fixed = torch.tensor([[0.5, 0.4], [0.8, 0.0], [0.0, 0.9]], dtype=F64)
    for t in range(12):
        arms = torch.stack([fixed, fixed / (1.0 + t % 5)])
        index = both.select(arms)
        assert int(alone.select(fixed)) == int(index[0])
        x, r = arms[torch.arange(2), index], torch.full((2,), float(t % 3 > 0), dtype=F64)
        both.update(x, r)
        alone.update(x[0], r[0])
    torch.testing.assert_close(both.budget[0], alone.budget, rtol=0, atol=1e-6)


def test_a_known_mean_is_one_and_keeps_its_digits():
    given = {"family": glb.Bernoulli(), "domain": glb.Ball(2, 3.0)}
    inner = policies.make("ofuglb-pb", **given, dtype=torch.float32)
    safe = Conservative(inner, 0, 0.5, 0.7)  # which float32 rounds down
    safe.select(torch.eye(2))
    assert float(safe.budget) == 0.35
    for bad in (math.nan, math.inf, -0.1, 1.1, [0.5, 0.5]):
        with pytest.raises(InputError, match="^baseline_mean: expected"):
            Conservative(inner, 0, 0.5, bad)


def test_conservative_refusals():
    gaussian = policies.make("ofuglb-pb", family=glb.Gaussian(1.0), domain=glb.Ball(2, 3.0))
    with pytest.raises(InputError, match="family"):
        Conservative(gaussian, 0, 0.1)
    inner = policies.make("ofuglb-pb", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0))
    with pytest.raises(InputError, match="baseline"):
        Conservative(inner, -1, 0.1)
    with pytest.raises(InputError, match="alpha"):
        Conservative(inner, 0, 1.0)
    with pytest.raises(InputError, match="policy"):
        Conservative(
            policies.make("random", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0)), 0, 0.1
        )
    with pytest.raises(InputError, match="arms"):
        Conservative(inner, 2, 0.1).select(torch.eye(2, dtype=F64))


@pytest.mark.parametrize(
    ("name", "options"),
    [("ol2m", {}), ("gloc", {"constants": "public"}), ("ofulog-r", {"constants": "public"})],
)
def test_a_constraint_needs_a_set_that_is_proven(name, options):
    given = {"family": glb.Bernoulli(), "domain": glb.Ball(2, 3.0)}
    with pytest.raises(InputError, match="proven to hold"):
        Conservative(policies.make(name, **given, **options), 0, 0.1)
    if options:
        Conservative(policies.make(name, **given), 0, 0.1)


# ---- as arguments and options ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["pac-bayes", "lipschitz", "centred", "mean-loss", "gaussian-prior"]
)
def test_any_radius_is_that_of_the_rows_that_count_at_the_delta_of_now(name):
    x, r = rows(40)
    found = glb.ConfidenceSequence(
        glb.Bernoulli(), glb.Ball(3, 2.0), 0.05, name, forgetting=Window(25)
    )
    found.update(x, r)
    plain = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, 2.0), 0.05 / (41 * 42), name)
    plain.update(x[15:], r[15:])
    torch.testing.assert_close(found.current().level, plain.current().level, rtol=1e-6, atol=1e-6)
    point = x[:4]
    torch.testing.assert_close(
        found.current().interval(point).upper,
        plain.current().interval(point).upper,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", [None, *KINDS], ids=repr)
@pytest.mark.parametrize("name", ["ofuglb", "ofuglb-pb", "lucb-contrast"])
def test_policies_have_the_sets_of_the_sequence(name, kind):
    x, r = rows(70)
    settings = {"family": glb.Bernoulli(), "domain": glb.Ball(3, 2.0)}
    policy = policies.make(name, forgetting=kind, radius="pac-bayes", **settings)
    sequence = sequence_of(kind)
    for learner in (policy, sequence):
        learner.update(x[:60], r[:60])
        for i in range(60, 70):
            learner.update(x[i], r[i])
    arms = rows(5, seed=4)[0]
    wanted = sequence.current().upper_bound(arms)
    torch.testing.assert_close(
        policy.confidence_set().upper_bound(arms), wanted, rtol=1e-3, atol=1e-3
    )
    if name != "lucb-contrast":
        assert int(policy.select(arms)) == int(wanted.argmax())


def test_rows_that_do_not_count_are_let_go():
    sequence = sequence_of(Window(20))
    x, r = rows(500)
    for i in range(500):
        sequence.update(x[i], r[i])
    assert len(sequence) == 500
    assert torch.equal(sequence.history.X, x[480:])
    assert sequence.state_dict()["history"]["X"].shape[-2] <= 64
    with pytest.raises(InputError, match="forgets nothing"):
        sequence.history.arrays()


def test_weights_of_ones_own_fade_too():
    x, r = rows(30)
    w = torch.linspace(0.0, 1.0, 30, dtype=F64)
    sequence = sequence_of(Discount(0.9))
    sequence.update(x, r, w)
    torch.testing.assert_close(sequence.history.w, w * 0.9 ** torch.arange(29.0, -1, -1).double())
    loss = glb.NegativeLogLikelihood(glb.Bernoulli(), x, r, sequence.history.w)
    expected = loss.expand(sequence.history.anchor)
    for carried, wanted in zip(sequence.history.carried(), expected, strict=True):
        torch.testing.assert_close(carried, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("other", ["aggregate", "running"])
def test_what_does_not_go_together_with_forgetting(other):
    with pytest.raises(InputError, match=f"^{other}"):
        glb.ConfidenceSequence(
            glb.Bernoulli(), glb.Ball(2, 2.0), 0.05, forgetting=Window(5), **{other: True}
        )
    with pytest.raises(InputError, match="forgetting"):
        policies.make(
            "ofuglb", family=glb.Bernoulli(), domain=glb.Ball(2, 2.0), forgetting={"windows": 3}
        )
    with pytest.raises(InputError, match="option of ofuglb-contrast"):
        policies.make(
            "ofuglb-contrast", family=glb.Bernoulli(), domain=glb.Ball(2, 2.0), forgetting=Window(3)
        )


def test_conservative_is_an_option_of_make():
    settings = {"family": glb.Bernoulli(), "domain": glb.Ball(2, 3.0)}
    arms = torch.tensor([[0.2, 0.1], [0.9, 0.1]], dtype=F64)
    found = [
        policies.make("ofuglb-pb", conservative=leash, **settings)
        for leash in ((0, 0.1), {"baseline": 0, "alpha": 0.1})
    ]
    for policy in found:
        assert isinstance(policy, Conservative)
        assert int(policy.select(arms)) == 0
        policy.update(arms[0], 1.0)
        assert policy.rounds == 1
    assert torch.equal(found[0].budget, found[1].budget)
    for bad in (0.1, (0,), {"baseline": 0}, {"baseline": 0, "alpha": 0.1, "beta": 1}):
        with pytest.raises(InputError, match="^conservative"):
            policies.make("ofuglb-pb", conservative=bad, **settings)
    with pytest.raises(InputError, match="forgets nothing"):
        policies.make("ofuglb-pb", conservative=(0, 0.1), forgetting=Window(9), **settings)
    other = policies.make("ofuglb-pb", conservative=(1, 0.1), **settings)
    with pytest.raises(InputError, match="baseline"):
        other.load_state_dict(found[0].state_dict())


@pytest.mark.slow
class TestForgettingContract(PolicyContract):
    name = "ofuglb-pb"
    options: ClassVar[dict[str, Any]] = {
        "forgetting": Discount(0.95),
        "radius": PACBayes(tolerance=1e-10, increments="rows"),
    }
    families = (glb.Bernoulli(), glb.Gaussian(0.5))


@pytest.mark.parametrize("radius", ["pac-bayes", "centred"])
def test_evidence_of_all_times_is_shared_between_them(radius):
    # E_t of the rows that count has mean 1 at each single time; E_t/(t (t + 1)) at all of them
    x, r = rows(60, d=2)
    given = (glb.Bernoulli(), glb.Ball(2, 2.0), 0.05, radius)
    plain, forgetful = (glb.ConfidenceSequence(*given, forgetting=f) for f in (None, Window(40)))
    plain.update(x[20:], r[20:])
    forgetful.update(x, r)
    price = math.log(61 * 62)
    alone, now = (sequence.current().test([1.0, 0.0], 1.9) for sequence in (plain, forgetful))
    assert float(alone.log_e - now.log_e) == pytest.approx(price, abs=0.25)
    region = forgetful.current()
    torch.testing.assert_close(region.at_delta(0.05).level, region.level)


def test_peeking_at_forgetful_evidence_rejects_no_more_often_than_it_says():
    # without its price nearly all runs reject a true hypothesis within some hundred looks
    generator, rejected = torch.Generator().manual_seed(0), 0
    for _ in range(10):
        sequence = glb.ConfidenceSequence(
            glb.Gaussian(), glb.Ball(1, 2.0), 0.05, forgetting=Window(5)
        )
        running = RunningTest(sequence, [1.0], 0.0)
        for noise in torch.randn(150, generator=generator, dtype=F64).tolist():
            sequence.update([1.0], noise)
            p = float(running.look().p)
        rejected += p <= 0.2
    assert scipy.stats.binomtest(rejected, 10, 0.2, alternative="greater").pvalue > 1e-3
