"""Contracts for parts of one's own: a test class inherits one, and gets all of its tests.

``FamilyContract`` (:mod:`torchglb.testing.families`), ``RadiusContract``
(:mod:`torchglb.testing.radii`), ``ConfidenceSetContract`` (:mod:`torchglb.testing.sets`) and
``PolicyContract`` (:mod:`torchglb.testing.policies`). They need pytest, and that of families mpmath
(``pip install torchglb[testing]``); each is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchglb.testing.families import FamilyContract
    from torchglb.testing.policies import PolicyContract
    from torchglb.testing.radii import RadiusContract
    from torchglb.testing.sets import ConfidenceSetContract

_PLACES = {
    "FamilyContract": "families",
    "RadiusContract": "radii",
    "ConfidenceSetContract": "sets",
    "PolicyContract": "policies",
}

__all__ = ["ConfidenceSetContract", "FamilyContract", "PolicyContract", "RadiusContract"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"torchglb.testing.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
