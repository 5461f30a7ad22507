"""What to do with confidence sets: name the best arm, stop, play safely, forget."""

from torchglb.decisions.best_arm import BestArm

__all__ = ["BestArm"]
