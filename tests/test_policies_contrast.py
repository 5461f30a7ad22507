"""Optimism by contrasts: oful-contrast and ofuglb-contrast."""

from typing import Any, ClassVar

from policy_contract import PolicyContract

from torchglb.families import Bernoulli, Gaussian, Poisson, QuasiBounded
from torchglb.radii import PACBayes


class TestOFULContrast(PolicyContract):
    name = "oful-contrast"
    families = (Gaussian(0.5),)
    uncovered = (Bernoulli(), Poisson())
    fixed_arms = True
    ball_arms = False


class TestOFUGLBContrast(PolicyContract):
    """The joint level as in the contract of ofuglb-pb, whose levels depend on when they are asked."""

    name = "ofuglb-contrast"
    options: ClassVar[dict[str, Any]] = {"radius": PACBayes(tolerance=1e-10, increments="rows")}
    families = (Bernoulli(), Gaussian(0.5))
    uncovered = (QuasiBounded("probit"),)
    fixed_arms = True
    ball_arms = False
