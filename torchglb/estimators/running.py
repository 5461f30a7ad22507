"""Intervals over time: what an analyst saw who looked after every block of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchglb.checks import check_count
from torchglb.estimators.linear_fit import LinearFit

#: looks, if nothing else is said
LOOKS = 40


@dataclass(frozen=True)
class Running:
    """Intervals of k contrasts after T looks.

    Attributes:
        n: rows of evidence at each look, ``(T,)``.
        names: of the contrasts.
        estimate: ``(T, k)``.
        lower: ends that are valid at all looks at once, ``(T, k)``.
        upper: the same.
        fixed_lower: ends of the fixed-sample interval, which one look would have given.
        fixed_upper: the same.

    Example:
        >>> import numpy as np
        >>> import torchglb as glb
        >>> rng = np.random.default_rng(0)
        >>> data = {"x": rng.uniform(0, 10, 400), "y": rng.integers(0, 2, 400)}
        >>> scaler = glb.estimators.Scaler(burn_in=100)
        >>> fit = glb.glm("y ~ x", data, family="bernoulli", scaler=scaler)
        >>> looks = fit.running("x", every=150)
        >>> looks.n.tolist(), looks.lower.shape
        ([150, 300], (2, 1))
    """

    n: np.ndarray
    names: tuple[str, ...]
    estimate: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    fixed_lower: np.ndarray
    fixed_upper: np.ndarray
    make: Callable[[Mapping[str, Any]], Any] | None = field(default=None, repr=False, compare=False)

    def to_frame(self) -> Any:
        """A row for every look and name."""
        T, k = self.estimate.shape
        columns: dict[str, Any] = {
            "n": np.repeat(self.n, k).tolist(),
            "name": list(self.names) * T,
        }
        for key in ("estimate", "lower", "upper", "fixed_lower", "fixed_upper"):
            columns[key] = getattr(self, key).reshape(-1).tolist()
        return columns if self.make is None else self.make(columns)


def looks_of(rows: int, every: int | None) -> np.ndarray:
    """After how many rows one looks: every so many and at the end."""
    if every is None:
        every = max(1, -(-rows // LOOKS))
    check_count("every", every, least=1)
    found = list(range(every, rows + 1, every))
    if rows and (not found or found[-1] != rows):
        found.append(rows)
    return np.array(found, dtype=int)


def run_over(
    fit: LinearFit,
    contrasts: np.ndarray,
    names: tuple[str, ...],
    every: int | None,
    intersect: bool,
    make: Callable[[Mapping[str, Any]], Any] | None,
) -> Running:
    """Adds the rows of a fit to a new one, block by block, and looks after each.

    Args:
        fit: with all rows.
        contrasts: ``(k, d)``.
        names: of the contrasts.
        every: rows between looks.
        intersect: keep the best ends so far, which are valid together.
        make: of frames.
    """
    rows, y, w = fit.rows()
    new, start, found = fit.anew(), 0, []
    at = looks_of(len(rows), every)
    for end in at:
        part = slice(start, end)
        new.append(rows[part].copy(), y[part], None if w is None else w[part])
        start = int(end)
        now, fixed = new.interval(contrasts), new.profile(contrasts)
        found.append([now.estimate, now.lower, now.upper, fixed.lower, fixed.upper])
    estimate, lower, upper, fixed_lower, fixed_upper = (
        np.array([look[part] for look in found]).reshape(len(at), len(contrasts))
        for part in range(5)
    )
    if intersect:
        lower, upper = np.maximum.accumulate(lower), np.minimum.accumulate(upper)
    return Running(at, names, estimate, lower, upper, fixed_lower, fixed_upper, make)
