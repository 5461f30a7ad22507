"""What to do with confidence sets: name the best arm and stop, play safely, forget."""

from torchglb.decisions.best_arm import BestArm
from torchglb.decisions.conservative import Conservative
from torchglb.decisions.forgetting import Discount, Forgetting, ForgettingSequence, Window
from torchglb.decisions.forgetting_policy import ForgettingOFUGLB

__all__ = [
    "BestArm",
    "Conservative",
    "Discount",
    "Forgetting",
    "ForgettingOFUGLB",
    "ForgettingSequence",
    "Window",
]
