"""Saved states of policies: what does not fit is refused by name, and changes nothing."""

import copy
import math

import pytest
import torch

import torchglb as glb


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
