"""What to do with confidence sets: name the best arm and stop, play safely, forget."""

from torchglb.decisions.best_arm import BestArm
from torchglb.forgetting import Discount, Window
from torchglb.policies import Conservative

__all__ = ["BestArm", "Conservative", "Discount", "Window"]
