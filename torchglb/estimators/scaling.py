"""Scales that are known before the evidence, and the way back to the units of the table.

A scale that is computed from all rows has seen the rows that it is used on: a prior, or a ball,
that is measured in such units depends on the future. Here it comes from declared ranges, from the
first rows, which then are no evidence, or from another table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchglb.checks import check_choice, check_count, check_flag, check_positive, refuse
from torchglb.choices import OUTSIDE, RowsOutside
from torchglb.errors import InputError
from torchglb.rounding import two_product, two_sum

#: what to type where no scale was given
ASK = (
    "scaler: expected one, because a scale computed from all rows is peeking. Type one of"
    " scaler=torchglb.Scaler(burn_in=200) (the first 200 rows give the scale and are no evidence),"
    " scaler=torchglb.Scaler(ranges={'age': (18, 90), 'arm': ['A', 'B']}) (what you know"
    " beforehand), scaler=torchglb.Scaler(pilot=table) (another table),"
    " scaler=torchglb.Scaler(unit=True) (columns are taken as they are)"
)


@dataclass(frozen=True)
class Scaler:
    """Where the scale of the columns comes from; nothing of it looks at the evidence.

    Without a bound S a scale is the unit in which the prior is measured: a better one gives shorter
    intervals, and none makes them wrong. With S it is also the region around which ``|x'beta| <=
    S`` is claimed (:func:`torchglb.glm`): rows beyond it are refused, or left out.

    Args:
        ranges: ``{"age": (18, 90), "arm": ["A", "B", "C"]}``: ends for numbers, levels for
            categories; also by factor, ``{"log(age)": (2.8, 4.6)}``. By itself it must name all;
            together with the others it overrides.
        burn_in: so many first rows give the scale, and the levels, and are no evidence.
        pilot: another table that gives them.
        unit: columns are taken as they are.
        outside: with S, rows beyond the region are refused (``"refuse"``) or left out
            (``"drop"``), which their features alone decide.
        margin: with S, numbers may go so many times further than in the burn-in or the pilot.

    Example:
        >>> Scaler(burn_in=200).source
        'the first 200 rows, which are no evidence'
    """

    ranges: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    burn_in: int | None = None
    pilot: Any = None
    unit: bool = False
    outside: RowsOutside = "refuse"
    margin: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.ranges, Mapping):
            raise refuse("ranges", "a mapping from names to (low, high) or levels", self.ranges)
        for name, value in self.ranges.items():
            _check_range(name, value)
        check_flag("unit", self.unit)
        given = [self.burn_in is not None, self.pilot is not None, self.unit]
        if sum(given) > 1 or not (any(given) or self.ranges):
            raise InputError(f"{ASK}; got {'several' if sum(given) > 1 else 'nothing'}")
        if self.burn_in is not None:
            check_count("burn_in", self.burn_in, least=2)
        check_choice("outside", self.outside, OUTSIDE)
        if check_positive("margin", self.margin) < 1.0:
            raise refuse("margin", "a number of at least 1", self.margin)

    @property
    def source(self) -> str:
        """Where the scale comes from, in words."""
        if self.burn_in is not None:
            return f"the first {self.burn_in} rows, which are no evidence"
        if self.pilot is not None:
            return "a pilot table"
        return "none: the columns as they are" if self.unit else "declared ranges"

    def interval(self, name: str) -> tuple[float, float] | None:
        """The declared ends of a number."""
        value = self.ranges.get(name)
        return None if value is None or _is_levels(value) else (float(value[0]), float(value[1]))

    def levels(self, name: str) -> list[Any] | None:
        """The declared levels of a category."""
        value = self.ranges.get(name)
        return list(value) if value is not None and _is_levels(value) else None


def _is_levels(value: Any) -> bool:
    return not isinstance(value, tuple)


def _check_range(name: str, value: Any) -> None:
    expected = "a pair (low, high) with low < high, or a list of levels"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise refuse(f"ranges[{name!r}]", expected, repr(value))
    if _is_levels(value):
        if len(set(value)) < 2 or len(set(value)) != len(value):
            raise refuse(f"ranges[{name!r}]", "two or more different levels", repr(value))
        return
    numbers = len(value) == 2 and all(isinstance(end, int | float) for end in value)
    if not numbers or not -math.inf < value[0] < value[1] < math.inf:
        raise refuse(f"ranges[{name!r}]", expected, repr(value))


@dataclass(frozen=True)
class Scale:
    """The affine map between the units of the table and those of the fit.

    A row x becomes ``s_j = (x_j - center_j)/half_j``; with the coefficients phi of s, and responses
    ``(y - y0)/unit``, the coefficients of x are a contrast of phi, without approximation:

        ``beta_j = unit phi_j/half_j,   beta_0 = unit (phi_0 - sum_j phi_j center_j/half_j) + y0``.

    Attributes:
        names: of the d columns.
        center: ``(d,)``; 0 for the intercept, and everywhere without one.
        half: ``(d,)``, positive.
        reach: ``(d,)``: how large ``|s_j|`` may get, where S bounds.
        intercept: its place, or None.
        y0: the origin of the response.
        unit: its unit.
        source: where the scale comes from, in words.

    Example:
        >>> Scale.identity(["x", "z"]).half
        array([1., 1.])
    """

    names: tuple[str, ...]
    center: np.ndarray
    half: np.ndarray
    reach: np.ndarray
    intercept: int | None = None
    y0: float = 0.0
    unit: float = 1.0
    source: str = "none: the columns as they are"

    @classmethod
    def identity(cls, names: Sequence[str], intercept: int | None = None) -> Scale:
        """Columns as they are."""
        d = len(names)
        return cls(tuple(names), np.zeros(d), np.ones(d), np.ones(d), intercept)

    @property
    def bound(self) -> float:
        """No allowed row is longer: ``|s| <= sqrt(sum reach^2)``."""
        return float(np.linalg.norm(self.reach))

    def rows(self, X: np.ndarray) -> np.ndarray:
        """Rows of the table, ``(n, d)``, in the units of the fit."""
        return (X - self.center) / self.half

    def response(self, y: np.ndarray) -> np.ndarray:
        """Responses in the units of the fit."""
        return y if self.unit == 1.0 and self.y0 == 0.0 else (y - self.y0) / self.unit

    def contrasts(self, C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A and a with ``C beta = A phi + a``, for C ``(k, d)``: A ``(k, d)``, a ``(k,)``."""
        shift, moved = np.zeros(len(C)), C
        if self.intercept is not None:
            first = C[:, self.intercept]
            moved = _less_product(C, first[:, None], self.center)
            shift = first * self.y0
        return self.unit * (moved / self.half), shift

    def beta(self, phi: np.ndarray) -> np.ndarray:
        """The coefficients in the units of the table."""
        A, shift = self.contrasts(np.eye(len(phi)))
        return A @ phi + shift


def _less_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a - b c``, rounded about once.

    Of a mean that is predicted at x, ``x - center`` may have few of the digits of both.
    """
    given, left, right = (torch.from_numpy(np.array(part, float)) for part in (a, b, c))
    product, lost = two_product(left, right)
    total, rest = two_sum(given, -product)
    return (total + (rest - lost)).numpy()
