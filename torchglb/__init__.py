"""torchglb: generalized linear models under adaptive data, in PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchglb import policies, radii
from torchglb.contrast_sequence import ContrastSequence
from torchglb.decisions import BestArm
from torchglb.domain import Ball
from torchglb.errors import BoundaryWarning, InputError, SolverError
from torchglb.estimate import Estimate
from torchglb.families import (
    Bernoulli,
    Binomial,
    CustomFamily,
    Gaussian,
    GLMFamily,
    Poisson,
    QuasiBounded,
)
from torchglb.forgetting import Discount, Window
from torchglb.heads import GLMHead, NeuralPolicy, UnitBall
from torchglb.inference.estimation import Incremental, Refit
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.mle import MLEResult, constrained_mle
from torchglb.optim import SolveResult, Status
from torchglb.preferences import PairHead, PreferenceSequence, leaderboard
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History
from torchglb.sequence import ConfidenceSequence
from torchglb.sets import EllipsoidSet, Interval, LikelihoodRatioSet
from torchglb.ucb import (
    AnchoredProgram,
    SublevelProgram,
    SupportResult,
    argmax_ball,
    support,
)

if TYPE_CHECKING:
    from torchglb.estimators import Scaler, glm

__version__ = "0.2.0"

#: names that are loaded when they are first asked for
_LATER = {"Scaler": "torchglb.estimators", "glm": "torchglb.estimators"}

__all__ = [
    "AnchoredProgram",
    "Ball",
    "Bernoulli",
    "BestArm",
    "Binomial",
    "BoundaryWarning",
    "ConfidenceSequence",
    "ContrastSequence",
    "CustomFamily",
    "Discount",
    "EllipsoidSet",
    "Estimate",
    "GLMFamily",
    "GLMHead",
    "Gaussian",
    "History",
    "Incremental",
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
    "Refit",
    "Rows",
    "Scaler",
    "SolveResult",
    "SolverError",
    "Status",
    "SublevelProgram",
    "SupportResult",
    "UnitBall",
    "Window",
    "argmax_ball",
    "constrained_mle",
    "environments",
    "glm",
    "leaderboard",
    "policies",
    "radii",
    "simulate",
    "support",
]


#: rooms that are opened when they are first asked for
_LATER_ROOMS = ("environments", "simulate")


def __getattr__(name: str) -> Any:
    if name in _LATER_ROOMS:
        return import_module(f"torchglb.{name}")
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
