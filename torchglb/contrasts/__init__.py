"""Contrasts that do not pay for the dimension: one number of theta*, its interval at all times."""

from torchglb.contrasts.parts import ContrastParts
from torchglb.contrasts.sequence import ContrastSequence

__all__ = ["ContrastParts", "ContrastSequence"]
