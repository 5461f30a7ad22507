"""Doors for analysts: formulas and tables, scikit-learn; intervals that survive peeking.

Tables need the extra ``table`` (formulaic, narwhals); ``GLMClassifier`` and ``GLMRegressor`` need
scikit-learn (the extra ``data``). Both are loaded when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

from torchglb.estimators.glm_fit import GLMFit, glm
from torchglb.estimators.linear_fit import LinearFit
from torchglb.estimators.packages import needed
from torchglb.estimators.results import Bounds, Evidence
from torchglb.estimators.running import Running
from torchglb.estimators.scaling import Scale, Scaler
from torchglb.estimators.summary import Summary
from torchglb.estimators.tables import TableError

if TYPE_CHECKING:
    from torchglb.estimators.scikit import GLMClassifier, GLMRegressor

__all__ = [
    "Bounds",
    "Evidence",
    "GLMClassifier",
    "GLMFit",
    "GLMRegressor",
    "LinearFit",
    "Running",
    "Scale",
    "Scaler",
    "Summary",
    "TableError",
    "glm",
]


def __getattr__(name: str) -> Any:
    if name in ("GLMClassifier", "GLMRegressor"):
        needed("sklearn", "data")
        from torchglb.estimators import scikit

        return getattr(scikit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
