"""Batched solvers over the ball that know nothing of GLMs."""

from torchglb.optim.ball import Derivatives, frank_wolfe_gap
from torchglb.optim.lbfgs import lbfgs
from torchglb.optim.newton import newton
from torchglb.optim.result import SolveResult, Status, raise_unless_converged

__all__ = [
    "Derivatives",
    "SolveResult",
    "Status",
    "frank_wolfe_gap",
    "lbfgs",
    "newton",
    "raise_unless_converged",
]
