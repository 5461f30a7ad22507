"""Optimism by contrasts: oful-contrast and ofuglb-contrast."""

from policy_contract import PolicyContract

from torchglb.families import Bernoulli, Gaussian, Poisson


class TestOFULContrast(PolicyContract):
    name = "oful-contrast"
    families = (Gaussian(0.5),)
    uncovered = (Bernoulli(), Poisson())
    fixed_arms = True
    ball_arms = False
