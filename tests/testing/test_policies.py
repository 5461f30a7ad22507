"""A policy of one's own under the contract that plugin authors inherit."""

import pytest
import torch

from torchglb import policies, testing
from torchglb.policies import Policy


class Ridge(Policy):
    """Ridge regression of the rewards, and a bonus for what was seen little."""

    def __init__(self, family, domain, *args, bonus=1.0, **settings):
        super().__init__(family, domain, *args, **settings)
        self.bonus = bonus
        self.A = torch.eye(domain.dim, dtype=self.dtype).expand(*self.batch_shape, -1, -1).clone()
        self.b = torch.zeros(*self.batch_shape, domain.dim, dtype=self.dtype)

    def _scores(self, arms):
        inverse = torch.linalg.solve(self.A[..., None, :, :], arms[..., None])[..., 0]
        theta = torch.linalg.solve(self.A, self.b)
        variance = (inverse * arms).sum(-1).clamp_min(0.0)
        return (arms * theta[..., None, :]).sum(-1) + self.bonus * variance.sqrt()

    def _state(self):
        return {"A": self.A.clone(), "b": self.b.clone()}

    def _load(self, state):
        self.A, self.b = state["A"].clone(), state["b"].clone()


class Sound(Ridge):
    """Nothing is called between the two that are committed."""

    name = "sound"

    def _update(self, x, r):
        A, b = self.A + x.mT @ x, self.b + (x * r[..., None]).sum(-2)
        self.A, self.b = A, b


class Torn(Ridge):
    """What interrupts it may leave one of the two behind."""

    name = "torn"

    def _update(self, x, r):
        self.A = self.A + x.mT @ x
        self.b = self.b + (x * r[..., None]).sum(-2)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Known to the tests of this file only."""
    for policy in (Sound, Torn):
        monkeypatch.setitem(policies.registry._POLICIES, policy.name, policy)


class TestSound(testing.PolicyContract):
    name = "sound"
    ball_arms = False


def test_an_update_that_may_be_torn_breaks_the_contract():
    contract = testing.PolicyContract()
    contract.name = "torn"
    with pytest.raises(AssertionError):
        contract.test_an_interrupted_update_is_all_or_nothing(masked=False)
