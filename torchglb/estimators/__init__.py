"""Doors for analysts: formulas and tables, scikit-learn; intervals that survive peeking.

Needs the extra ``table`` (formulaic, narwhals); the scikit-learn estimators, in
:mod:`torchglb.estimators.scikit`, need scikit-learn.
"""

from torchglb.estimators.glm import GLMFit, glm
from torchglb.estimators.linear_fit import Bounds, Evidence, LinearFit
from torchglb.estimators.running import Running
from torchglb.estimators.scaling import Scale, Scaler
from torchglb.estimators.summary import Summary
from torchglb.estimators.tables import TableError

__all__ = [
    "Bounds",
    "Evidence",
    "GLMFit",
    "LinearFit",
    "Running",
    "Scale",
    "Scaler",
    "Summary",
    "TableError",
    "glm",
]
