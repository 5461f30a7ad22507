"""Contrasts that do not pay for the dimension: one number of theta*, its interval at all times."""

from torchglb.contrasts.sequence import ContrastParts, ContrastSequence

__all__ = ["ContrastParts", "ContrastSequence"]
