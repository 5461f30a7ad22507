"""Best arms: the sampling rule, certified stopping, and how often it errs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb import policies
from torchglb.decisions import BestArm
from torchglb.errors import InputError
from torchglb.radii import PACBayes
from torchglb.simulate.observer import largest_bound
from torchglb.testing.policies import PolicyContract

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import stopping

F64 = torch.float64
ARMS = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-0.8, 0.6]], dtype=F64)


@pytest.mark.slow  # the sets are those of ofuglb-contrast, whose contract is tested by default
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
        (
            {"source": glb.ContrastSequence(glb.Bernoulli(), glb.Ball(2, 3.0), [[1, -1]], 0.05)},
            "source: expected one with a confidence set, got ContrastSequence",
        ),
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


def test_stopping_errs_no_more_often_than_promised():
    found = stopping.stopped("lucb-contrast", 20, arms=5, epsilon=0.0, horizon=300, every=60)
    assert found.pvalue(0.1) > 0.01
    assert found.done.any()
    assert set(found.when[~found.done]) <= {300}


@pytest.mark.slow
@pytest.mark.parametrize("rule", stopping.RULES)
def test_stopping_errs_no_more_often_than_promised_over_500_runs(rule):
    """Any sampling rule: an exact binomial test of the wrong answers against delta = 0.1."""
    found = stopping.stopped(rule, 500)
    assert found.pvalue(0.1) > 0.01
    assert found.done.mean() > 0.9  # or there was little to err about


@pytest.mark.parametrize("rule", stopping.RULES)
def test_runs_go_on_without_those_that_have_stopped(rule):
    settings = {"S": 4.0, "seed": 3, "arms": 4, "dim": 2}
    whole = stopping.Runs(rule, torch.arange(3), settings, 0.1)
    for t in range(8):
        whole.play(t)
    part = whole.only(torch.tensor([0, 2]))
    for t in range(8, 12):
        whole.play(t)
        part.play(t)
    assert part.names.tolist() == [0, 2]
    for (index, r), (other, reward) in zip(part._seen, whole._seen, strict=True):
        assert torch.equal(index, other[[0, 2]])
        assert torch.equal(r, reward[[0, 2]])


def test_a_ratio_of_means_has_the_error_of_paired_runs():
    first = np.array([1.0, 2.0, 3.0, 4.0])
    assert stopping.ratio(2.0 * first, first) == (2.0, 0.0)
    value, error = stopping.ratio(np.array([2.0, 4.0, 6.0, 10.0]), first)
    assert value == 2.2
    expected = np.std([-0.2, -0.4, -0.6, 1.2], ddof=1) / 2.0 / 2.5
    assert abs(error - expected) < 1e-12


def test_the_certificate_of_a_rule_that_explores_is_about_all_arms():
    """The observer must not take the arm that is played for the one with the largest bound."""
    policy = policies.make("lucb-contrast", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0))
    policy.update(ARMS.repeat(12, 1), [1.0, 0.0, 1.0, 0.0] * 12)
    bounds = policy.confidence_set().upper_bound(ARMS)
    for chosen in bounds:
        found = largest_bound(policy, ARMS, chosen)
        torch.testing.assert_close(found, bounds.max(), rtol=1e-6, atol=1e-6)


def test_one_arm_is_nothing_to_compare():
    log = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05)
    with pytest.raises(InputError, match="arms: expected at least two"):
        BestArm(log, [[1.0, 0.0]])
