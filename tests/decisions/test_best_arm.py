"""Best arms: the sampling rule, certified stopping, and how often it errs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import scipy.stats
import torch

import torchglb as glb
from torchglb import environments, policies
from torchglb.decisions import BestArm
from torchglb.errors import InputError
from torchglb.radii import PACBayes
from torchglb.testing.policies import PolicyContract

F64 = torch.float64
ARMS = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-0.8, 0.6]], dtype=F64)


class TestLUCBContrast(PolicyContract):
    name = "lucb-contrast"
    options: ClassVar[dict[str, Any]] = {"radius": PACBayes(tolerance=1e-10, increments="rows")}
    families = (glb.Bernoulli(), glb.Gaussian(0.5))
    ball_arms = False


def log_of(theta, n, batch=(), seed=0, arms=ARMS, S=3.0, delta=0.05):
    """A sequence that has seen n rows of every arm, in turn."""
    generator = torch.Generator().manual_seed(seed)
    sequence = glb.ConfidenceSequence(
        glb.Bernoulli(), glb.Ball(2, S), delta, batch_shape=batch, aggregate=True
    )
    x = arms.repeat(n, 1).expand(*batch, n * len(arms), 2)
    r = torch.bernoulli(torch.sigmoid(x @ theta), generator=generator)
    sequence.update(x, r)
    return sequence


def test_margin_and_candidates_agree_with_the_program_arm_by_arm():
    sequence = log_of(torch.tensor([1.0, 0.4], dtype=F64), 60)
    region, best = sequence.current(), BestArm(sequence, ARMS)
    h = torch.stack([region.support(ARMS - x, throw=False).upper for x in ARMS])  # h[i, j]
    h.fill_diagonal_(0.0)
    leader = int((ARMS @ region.center).argmax())
    others = [j for j in range(4) if j != leader]
    assert best.leaders().tolist() == [leader]
    torch.testing.assert_close(best.margin(), h[leader, others].max())
    expected = [all(h[j, i] >= 0 for j in range(4) if j != i) for i in range(4)]
    assert best.candidates().tolist() == expected
    assert any(expected)
    assert not all(expected)


def test_it_stops_with_enough_data_and_not_without():
    theta = torch.tensor([2.0, -1.0], dtype=F64)
    early, late = (BestArm(log_of(theta, n), ARMS) for n in (3, 1500))
    assert not early.should_stop()
    assert early.candidates().sum() > 1
    assert "more is not certain yet" in early.statement()
    assert late.should_stop()
    assert late.recommendation().tolist() == [0]
    assert late.candidates().tolist() == [True, False, False, False]
    assert late.statement() == (
        "With probability at least 0.95, arm 0 is the best of 4, at whatever time this is read and"
        " however the arms were chosen."
    )


def test_a_tolerance_and_the_k_best_stop_earlier():
    theta = torch.tensor([2.0, 0.9], dtype=F64)
    sequence = log_of(theta, 400)
    exact, rough = (BestArm(sequence, ARMS, epsilon) for epsilon in (0.0, 1.5))
    assert not exact.should_stop()
    assert rough.should_stop()
    assert rough.margin() <= exact.margin()
    two = BestArm(sequence, ARMS, k=2, epsilon=0.9)
    assert two.recommendation().shape == (2,)
    assert bool(two.should_stop()) == bool(two.margin() <= 0.9)
    assert two.candidates().sum() >= 2
    assert "2 best of 4 up to 0.9" in two.statement() or "not certain" in two.statement()


def test_a_batch_is_what_its_elements_are():
    theta = torch.tensor([1.5, 0.2], dtype=F64)
    sequence = log_of(theta, 50, batch=(3,))
    whole = BestArm(sequence, ARMS)
    assert whole.should_stop().shape == (3,)
    assert len(whole.statement()) == 3
    for i in range(3):
        part = BestArm(sequence.current()[i], ARMS)
        assert torch.equal(part.candidates(), whole.candidates()[i])
        torch.testing.assert_close(part.margin(), whole.margin()[i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": 3}, "source"),
        ({"arms": [[1.0, 2.0, 3.0]]}, "arms"),
        ({"k": 4}, "k"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"arms": [[float("nan"), 0.0], [0.0, 1.0]]}, "arms"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    settings = {"source": log_of(torch.zeros(2, dtype=F64), 2), "arms": ARMS} | change
    with pytest.raises(InputError, match=rf"^{message}"):
        BestArm(**settings)


def test_a_policy_without_a_set_is_refused():
    policy = policies.make("random", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0))
    with pytest.raises(InputError, match="source"):
        BestArm(policy, ARMS)


def stopped(rule, runs, *, horizon, every, delta, seed=0, arms=5, epsilon=0.0):
    """Rounds until each run is certified, and whether the named arm was right."""
    world = environments.make(
        "fixed", family=glb.Bernoulli(), S=4.0, replicates=runs, seed=seed, arms=arms,
        shared_arms=False, theta="random",
    )  # fmt: skip
    options = {} if rule == "random" else {"aggregate": True}
    if rule == "ofuglb":
        options["radius"] = "pac-bayes"
    policy = policies.make(
        rule, family=glb.Bernoulli(), domain=world.domain, delta=delta, batch_shape=(runs,),
        horizon=horizon, **options,
    )  # fmt: skip
    log = glb.ConfidenceSequence(
        glb.Bernoulli(), world.domain, delta, batch_shape=(runs,), aggregate=True
    )
    source = log if rule == "random" else policy
    x = world.arms(0)
    values = (x * world.theta_star[:, None, :]).sum(-1)
    best = BestArm(source, x, epsilon)
    when = torch.full((runs,), horizon)
    right = torch.ones(runs, dtype=torch.bool)
    running = torch.ones(runs, dtype=torch.bool)
    for t in range(horizon):
        index = policy.select(x)
        row, r = x[torch.arange(runs), index], world.rewards(t, x, index)
        policy.update(row, r)
        if rule == "random":
            log.update(row, r)
        if (t + 1) % every == 0:
            done = best.should_stop() & running
            named = best.recommendation()[:, 0]
            behind = values.amax(-1) - values.gather(-1, named[:, None])[:, 0]
            when = torch.where(done, t + 1, when)
            right &= ~done | (behind <= epsilon)
            running &= ~done
            if not running.any():
                break
    return when, right, ~running


def test_stopping_errs_no_more_often_than_promised():
    when, right, done = stopped("lucb-contrast", 20, horizon=300, every=60, delta=0.1)
    misses = int((~right).sum())
    assert scipy.stats.binomtest(misses, 20, 0.1, alternative="greater").pvalue > 0.01
    assert done.any()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["random", "ofuglb", "lucb-contrast"])
def test_stopping_errs_no_more_often_than_promised_over_500_runs(rule):
    _, right, _ = stopped(rule, 500, horizon=400, every=100, delta=0.1)
    misses = int((~right).sum())
    assert scipy.stats.binomtest(misses, 500, 0.1, alternative="greater").pvalue > 0.01
