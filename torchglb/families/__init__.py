"""GLM families: Bernoulli, binomial, Gaussian, Poisson, bounded quasi-likelihoods, custom ones."""

from torchglb.families.base import GLMFamily, LossTerms, check_family, has_formulas_of
from torchglb.families.bernoulli import Bernoulli, Binomial
from torchglb.families.bounded import QuasiBounded
from torchglb.families.custom import CustomFamily
from torchglb.families.gaussian import Gaussian
from torchglb.families.poisson import Poisson

__all__ = [
    "Bernoulli",
    "Binomial",
    "CustomFamily",
    "GLMFamily",
    "Gaussian",
    "LossTerms",
    "Poisson",
    "QuasiBounded",
    "check_family",
    "has_formulas_of",
]
