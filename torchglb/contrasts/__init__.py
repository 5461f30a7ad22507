"""Contrasts that do not pay for the dimension: one number of theta*, its interval at all times."""

from torchglb.contrasts.declared import DeclaredContrasts
from torchglb.contrasts.parts import ContrastParts

__all__ = ["ContrastParts", "DeclaredContrasts"]
