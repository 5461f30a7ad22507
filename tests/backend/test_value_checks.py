"""Rows that are no numbers are seen, wherever in a row they are."""

import itertools
import math

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb.backend.value_checks import rewards_within, rows_within
from torchglb.testing.policies import assert_same, reload


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rest", [0.0, 1e-300, 0.5, 1e200])
def test_a_row_with_an_entry_that_is_no_number_is_not_within(wrong, rest):
    for place, longest in itertools.product(range(3), (1.0, 1e300, math.inf)):
        row = np.full(3, rest)
        row[place] = wrong
        assert not rows_within(row[None], longest)
    assert not rewards_within(np.array([0.0, wrong]), -math.inf, math.inf, False)


@pytest.mark.parametrize("name", ["ofuglb", "ofuglb-pb"])
def test_policies_refuse_a_row_of_nan_and_zeros(name):
    policy = glb.policies.make(name, family=glb.Bernoulli(), domain=glb.Ball(2, 2.0))
    before = reload(policy.state_dict())
    x, r = torch.tensor([math.nan, 0.0]).double(), torch.tensor(1.0).double()
    with pytest.raises(glb.InputError, match="x: expected finite values"):
        policy.update(x, r)
    arms = torch.tensor([[math.nan, 0.0], [0.5, 0.5]]).double()
    with pytest.raises(glb.InputError, match="arms: expected finite values"):
        policy.select(arms)
    assert_same(policy.state_dict(), before)
