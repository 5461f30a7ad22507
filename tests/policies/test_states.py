"""Saved states of policies: what does not fit is refused by name, and changes nothing."""

import copy
import inspect
import math

import pytest
import torch

import torchglb as glb
from torchglb import random_streams
from torchglb.testing.policies import Interruption


def _policy(rows, aggregate=False):
    domain = glb.Ball(3, 2.0)
    policy = glb.policies.make(
        "ofuglb-e", family=glb.Bernoulli(), domain=domain, aggregate=aggregate
    )
    for s in range(rows):
        policy.update(0.9 * torch.eye(3, dtype=torch.float64)[s % 3], 1.0)
    return policy


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(
    ("part", "name"), [("ellipsoid", "curvature"), ("fit", "hessian"), ("fit", "theta")]
)
def test_ellipsoid_of_another_shape(rows, aggregate, part, name):
    """Below d rows the curvature is that of the rows, else a matrix: both are looked at."""
    policy, arms = _policy(rows, aggregate), torch.eye(3, dtype=torch.float64)
    before, state = policy.scores(arms), policy.state_dict()
    fresh = _policy(0, aggregate)
    fresh.load_state_dict(copy.deepcopy(state))
    assert torch.equal(fresh.scores(arms), before)
    state = copy.deepcopy(state)
    state["state"][part][name] = torch.zeros(7, dtype=torch.float64)
    with pytest.raises(glb.InputError, match=name):
        policy.load_state_dict(state)
    assert torch.equal(policy.scores(arms), before)


@pytest.mark.parametrize("name", ["X", "y"])
def test_rows_that_are_no_numbers(name):
    """Answers would be NaN, also where nobody validates single rows."""
    policy, arms = _policy(5), torch.eye(3, dtype=torch.float64)
    before, state = policy.scores(arms), copy.deepcopy(policy.state_dict())
    state["state"]["history"][name].select(-1, 0).fill_(math.nan)
    with pytest.raises(glb.InputError, match=f"state\\['{name}'\\]"):
        policy.load_state_dict(state)
    assert torch.equal(policy.scores(arms), before)


@pytest.mark.parametrize("own", ["policy", "streams"])
@pytest.mark.parametrize(
    "name", ["oful-contrast", "ofuglb-contrast", "ts", "evill", "evill-theory"]
)
def test_an_interrupted_choice_is_all_or_nothing(name, own):
    """It declares arms and draws numbers, or does not; half of it broke the policy."""
    family = glb.Gaussian() if name == "oful-contrast" else glb.Bernoulli()
    policy = glb.policies.make(name, family=family, domain=glb.Ball(2, 2.0), horizon=50)
    arms = torch.tensor([[0.8, 0.1], [0.3, 0.9], [0.6, 0.6], [0.0, 0.0]], dtype=torch.float64)
    file = inspect.getfile(type(policy) if own == "policy" else random_streams)

    def play(policy):
        choices = []
        for t in range(6):
            choices.append(int(policy.select(arms)))
            policy.update(arms[choices[-1]], float(t % 2))
        return choices, policy.bounds(arms[0])

    aware, bounds = copy.deepcopy(policy), play(copy.deepcopy(policy))[1]
    calls = Interruption.count(lambda: aware.select(arms), file)
    whole = [play(copy.deepcopy(one))[0] for one in (policy, aware)]
    early, late = range(1, min(calls, 15)), range(max(1, calls - 5), calls + 1)
    for call in sorted({*early, *range(1, calls, 1 + calls // 10), *late}):
        struck = copy.deepcopy(policy)
        with pytest.raises(KeyboardInterrupt), Interruption(call, file):
            struck.select(arms)
        choices, ends = play(struck)
        assert choices in whole
        if "contrast" in name:
            assert struck.contrast_bounds() is not None
        if bounds is not None:
            torch.testing.assert_close(ends, bounds, rtol=0, atol=1e-6)
