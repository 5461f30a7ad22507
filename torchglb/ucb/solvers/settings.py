"""The settings of the solvers, as types: what ``**options`` of :func:`torchglb.support` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from torchglb.array_like import ArrayLike
from torchglb.choices import ProgramSolver


class NativeSettings(TypedDict, total=False):
    """Those of :class:`torchglb.ucb.Native`."""

    center: ArrayLike | None
    tol: float | None
    max_steps: int
    throw: bool
    validate: bool


class ConicSettings(TypedDict, total=False):
    """Those of :class:`torchglb.ucb.Conic`, but for its ``solver``: a name stands for the class."""

    fallbacks: Sequence[str]
    tol: float
    max_steps: int | None
    throw: bool


class LayerSettings(ConicSettings, total=False):
    """Those of :class:`torchglb.ucb.Layer`, but for its ``solver``."""

    mode: str


class BoundSettings(NativeSettings, total=False):
    """Those of the bounds of a confidence set behind which a program is solved."""

    solver: ProgramSolver
