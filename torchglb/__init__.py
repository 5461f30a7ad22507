"""torchglb: generalized linear models under adaptive data, in PyTorch."""

from torchglb.decisions import BestArm
from torchglb.domain import Ball
from torchglb.errors import InputError, SolverError
from torchglb.families import (
    Bernoulli,
    Binomial,
    CustomFamily,
    Gaussian,
    GLMFamily,
    Poisson,
    QuasiBounded,
)
from torchglb.heads import GLMHead, NeuralPolicy, UnitBall
from torchglb.history import History, Rows
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import MLEResult, constrained_mle
from torchglb.optim import SolveResult, Status
from torchglb.preferences import PairHead, PreferenceSequence, leaderboard
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import EllipsoidSet, Interval, LikelihoodRatioSet
from torchglb.ucb import (
    AnchoredProgram,
    SublevelProgram,
    SupportResult,
    argmax_ball,
    support,
)

__version__ = "0.1.0"

__all__ = [
    "AnchoredProgram",
    "Ball",
    "Bernoulli",
    "BestArm",
    "Binomial",
    "ConfidenceSequence",
    "CustomFamily",
    "EllipsoidSet",
    "GLMFamily",
    "GLMHead",
    "Gaussian",
    "History",
    "InputError",
    "Interval",
    "LikelihoodRatioSet",
    "MLEResult",
    "NegativeLogLikelihood",
    "NeuralPolicy",
    "PairHead",
    "Poisson",
    "PreferenceSequence",
    "QuasiBounded",
    "Rows",
    "SolveResult",
    "SolverError",
    "Status",
    "SublevelProgram",
    "SupportResult",
    "UnitBall",
    "argmax_ball",
    "constrained_mle",
    "leaderboard",
    "support",
]
