"""The norm-constrained maximum-likelihood estimate: one door, torch and compiled code behind it."""

from torchglb.mle.constrained import MLEResult, constrained_mle, minimize_likelihood

__all__ = ["MLEResult", "constrained_mle", "minimize_likelihood"]
