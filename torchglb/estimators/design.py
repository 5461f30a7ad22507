"""From a formula and a table to rows of numbers, and the scale that goes with them.

A formula is code. It comes from whoever calls, never from the data: a column is only ever looked up
by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from torchglb.errors import InputError
from torchglb.estimators.packages import needed
from torchglb.estimators.scaling import Scale, Scaler
from torchglb.estimators.tables import Table, numbers, order_of, refused, without_missing

if TYPE_CHECKING:
    import pandas as pd

#: the name of the constant: a column of the table that is called so would be taken for it
INTERCEPT = "Intercept"
#: what may be the name of a column in an expression
_WORD = re.compile(r"[^\W\d]\w*")
#: with which the parser of formulas marks a place
_MARKS = re.compile("\x1b\\[[\\d;]*m|[\u29da\u29db]")


@dataclass(frozen=True)
class Design:
    """How rows of a table become rows of a model.

    Attributes:
        formula: as it was given.
        spec: formulaic's description of the right-hand side, with the levels and the states of its
            transforms as the basis rows had them.
        left: formulaic's left-hand side.
        target: the name of the response.
        names: of the columns of the model.
        levels: of the categories, by column of the table.
        columns: of the table that the formula needs.
    """

    formula: str
    spec: Any
    left: Any
    target: str
    names: tuple[str, ...]
    levels: dict[str, list[Any]]
    columns: tuple[str, ...]

    @property
    def intercept(self) -> int | None:
        """The place of the intercept."""
        return self.names.index(INTERCEPT) if INTERCEPT in self.names else None

    @property
    def features(self) -> tuple[str, ...]:
        """The columns of the table on the right-hand side."""
        return tuple(sorted(variables(self.spec.formula, self.columns)))

    def matrix(self, frame: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
        """The rows of the model, ``(n, d)``; refuses unknown levels and what is not finite."""
        frame = _prepared(frame, self.spec.formula, self.levels, rows)
        X = _materialise(self.spec, frame)
        finite = np.isfinite(X)
        if not finite.all():
            row, column = (int(place[0]) for place in np.nonzero(~finite))
            raise refused(self.names[column], "finite values", X[row, column], int(rows[row]))
        return X

    def response(self, frame: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
        """The left-hand side, ``(n,)``."""
        if self.target in frame.columns:
            word = frame[self.target].iloc[0] if len(frame) else ""
            yes = f"I({self.target} == {str(word)!r}) for the share of that word"
            y = numbers(frame[self.target], self.target, rows, words=yes)
        else:
            y = _materialise(self.left, frame)
            if y.shape[1] != 1:
                raise InputError(
                    f"formula: expected one response before ~, got {y.shape[1]} columns"
                )
            y = y[:, 0]
        bad = np.flatnonzero(~np.isfinite(y))
        if len(bad):
            raise refused(self.target, "finite numbers", y[bad[0]], int(rows[bad[0]]))
        return y


def _plain(error: Exception) -> str:
    """The words of an error of the formula's parser in one line, without its colours."""
    return " ".join(_MARKS.sub("", str(error)).split())


def _materialise(spec: Any, frame: pd.DataFrame) -> np.ndarray:
    errors = needed("formulaic.errors")
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused by its row
            found = spec.get_model_matrix(frame, context={}, output="numpy", na_action="ignore")
    except errors.FormulaicError as error:
        raise InputError(
            f"formula: expected one that the table can answer, got: {_plain(error)}"
        ) from None
    return np.asarray(found, dtype=np.float64)


def categorised(
    frame: pd.DataFrame, levels: dict[str, list[Any]], rows: np.ndarray
) -> pd.DataFrame:
    """The same with the categories as such; a level that is not declared is refused by its row."""
    pandas = needed("pandas")
    changed = {}
    for name, known in levels.items():
        if name not in frame.columns:
            continue
        unknown = np.flatnonzero(~frame[name].isin(known))
        if len(unknown):
            value, row = frame[name].iloc[int(unknown[0])], int(rows[unknown[0]])
            value = value.item() if isinstance(value, np.generic) else value  # as one types it
            line = f"ranges={{{name!r}: {[*known, value]!r}}}"
            expected = f"one of the levels {known} (or Scaler(..., {line}))"
            raise refused(name, expected, repr(value), row)
        changed[name] = pandas.Categorical(frame[name], categories=known)
    return frame.assign(**changed)


def _plain_columns(right: Any, columns: Iterable[str], levels: Iterable[str]) -> list[str]:
    """Columns that are factors as they stand, and no categories."""
    named = {str(factor.expr) for term in right for factor in term.factors}
    return [name for name in columns if name in named and name not in levels]


def _prepared(
    frame: pd.DataFrame, right: Any, levels: dict[str, list[Any]], rows: np.ndarray
) -> pd.DataFrame:
    """The same with categories as such, and with numbers where there are objects.

    Decimals and very large integers are objects, of which each would be a level.
    """
    frame, changed = categorised(frame, levels, rows), {}
    for name in _plain_columns(right, frame.columns, levels):
        if frame[name].dtype.kind == "O":
            changed[name] = numbers(frame[name], name, rows, words=f"C({name}) for categories")
    return frame.assign(**changed)


def variables(side: Any, columns: Iterable[str]) -> set[str]:
    """The columns of a table that one side of a formula needs."""
    try:
        found = set(map(str, side.required_variables))
    except SyntaxError:  # formulaic before 1.2.2, for a quoted name that is no Python
        found = set()
    for term in side:
        for factor in term.factors:
            words = {str(factor.expr), *_WORD.findall(str(factor.expr))}
            found |= {name for name in columns if name in words}
    return found


def parsed(formula: str, table: Table) -> tuple[Any, Any, str]:
    """Left-hand side, right-hand side and the name of the response."""
    formulaic, errors = needed("formulaic"), needed("formulaic.errors")
    if not isinstance(formula, str):
        raise InputError(f"formula: expected a text such as 'y ~ x', got {type(formula).__name__}")
    try:
        found = formulaic.Formula(formula)
    except errors.FormulaicError as error:
        raise InputError(
            f"formula: expected one such as 'y ~ x + C(arm)', got: {_plain(error)}"
        ) from None
    if not (hasattr(found, "lhs") and hasattr(found, "rhs")):
        raise InputError(f"formula: expected a response before ~, as in 'y ~ x', got {formula!r}")
    if len(found.lhs) != 1:
        raise InputError(f"formula: expected one response before ~, got {len(found.lhs)}")
    for side in (found.lhs, found.rhs):
        names = variables(side, table.columns)
        table.require(sorted(names), "formula")
        if INTERCEPT in names:
            raise InputError(
                f"formula: expected another name for the column {INTERCEPT!r}, which is that of the"
                f" constant, got {formula!r}"
            )
    return found.lhs, found.rhs, str(next(iter(found.lhs)))


def learn(
    formula: str, table: Table, scaler: Scaler, time: str | None, missing: str
) -> tuple[Design, Scale]:
    """The design and the scale, from what the scaler may look at and from nothing else."""
    left, right, target = parsed(formula, table)
    of_right = variables(right, table.columns)
    needed_columns = tuple(sorted({*variables(left, table.columns), *of_right}))
    source = _basis_table(table, scaler, needed_columns)
    factors = {str(factor.expr) for term in right for factor in term.factors}
    for name in scaler.ranges:
        if name not in factors:
            table.require([name], "ranges")
    levels = {
        name: known
        for name in sorted(of_right)
        if (known := scaler.levels(name) or table.levels(name)) is not None
    }
    _refuse_words(right, table, levels)
    if source is None:
        frame = _declared(table, scaler, sorted(of_right), levels)
        rows = np.arange(len(frame))
    else:
        order = order_of(source, time if source is table else None)
        count = scaler.burn_in if source is table and scaler.burn_in else len(source)
        if len(source) < count:
            raise InputError(f"burn_in: expected at least {count} rows, got {len(source)}")
        rows = np.arange(count) if order is None else order[:count]
        frame = source.block(needed_columns, slice(0, count) if order is None else rows)
        frame, rows = without_missing(frame, rows, missing)
    spec = _learnt_spec(right, _prepared(frame, right, levels, rows))
    levels = _all_levels(spec, levels, scaler, frame, source is None)
    design = Design(formula, spec, left, target, tuple(spec.column_names), levels, needed_columns)
    if scaler.unit:
        scale = Scale.identity(design.names, design.intercept)
        return design, scale
    X = None if source is None else design.matrix(frame, rows)
    y = None if source is None else design.response(frame, rows)
    return design, scale_of(design, scaler, X, y)


def _basis_table(table: Table, scaler: Scaler, columns: Sequence[str]) -> Table | None:
    """The table whose rows the scaler may look at; None for declared ranges."""
    if scaler.pilot is not None:
        pilot = Table(scaler.pilot)
        pilot.require(columns, "pilot")
        return pilot
    return table if scaler.burn_in is not None else None


def _refuse_words(right: Any, table: Table, levels: dict[str, list[Any]]) -> None:
    """A column of words must be named a category, or one stray word would make it one."""
    for name in _plain_columns(right, table.columns, levels):
        if table.is_text(name):
            values = table.values(name)
            there = np.flatnonzero(~needed("pandas").isna(values))
            numbers(values[there], name, there, words=f"C({name}) for categories")
            if any(isinstance(value, str) for value in values[there]):
                raise refused(name, f"numbers (or C({name}) for categories)", "words")


def _declared(
    table: Table, scaler: Scaler, columns: Sequence[str], levels: dict[str, list[Any]]
) -> pd.DataFrame:
    """Made-up rows that have all declared levels and ends, and nothing of the data but types."""
    pandas = needed("pandas")
    count = 2 * max([1, *map(len, levels.values())])
    made = {}
    for name in columns:
        values: Sequence[Any]
        if name in levels:
            values = levels[name]
        elif (ends := scaler.interval(name)) is not None:
            values = ends
        else:
            values = [table.values(name)[0]] if len(table) else [1.0]
        made[name] = [values[index % len(values)] for index in range(count)]
    return pandas.DataFrame(made)


def _learnt_spec(right: Any, frame: pd.DataFrame) -> Any:
    errors = needed("formulaic.errors")
    try:
        with np.errstate(all="ignore"):
            found = right.get_model_matrix(frame, context={}, output="numpy", na_action="ignore")
        return found.model_spec
    except errors.FormulaicError as error:
        raise InputError(
            f"formula: expected one that the table can answer, got: {_plain(error)}"
        ) from None


def _is_category(spec: Any, factor: Any) -> bool:
    kind = spec.encoder_state.get(str(factor.expr), (None,))[0]
    return getattr(kind, "value", None) == "categorical"


def _all_levels(
    spec: Any, levels: dict[str, list[Any]], scaler: Scaler, frame: pd.DataFrame, declared: bool
) -> dict[str, list[Any]]:
    """The levels of every category, by column; with declared ranges all must be declared."""
    if declared and not scaler.unit and spec.transform_state:
        name = next(iter(spec.transform_state))
        raise InputError(
            f"formula: expected no transform that learns from rows with declared ranges, got"
            f" {name!r} (take Scaler(burn_in=...) or Scaler(pilot=...))"
        )
    found = dict(levels)
    for factor, variables in spec.factor_variables.items():
        if not _is_category(spec, factor):
            continue
        for name in set(map(str, variables)) & set(frame.columns):
            if name in found:
                continue
            if declared:
                raise InputError(
                    f"ranges: expected the levels of {name!r}: type"
                    f" Scaler(ranges={{{name!r}: ['first level', 'second level', ...]}}), got none"
                )
            state = spec.encoder_state[str(factor.expr)][1]
            found[name] = list(state["categories"])
    return found


def scale_of(design: Design, scaler: Scaler, X: np.ndarray | None, y: np.ndarray | None) -> Scale:
    """The scale of every column: by declared ends, else by the basis rows."""
    names, first = design.names, design.intercept
    base = Scale.identity(names, first)
    center, half, reach = base.center.copy(), base.half.copy(), base.reach.copy()
    place = {name: index for index, name in enumerate(names)}
    for entry in design.spec.structure:
        at = [place[name] for name in entry.columns if name != INTERCEPT]
        if not at:
            continue
        factors = list(entry.term.factors)
        numeric = [f for f in factors if not _is_category(design.spec, f)]
        pure = len(numeric) == len(factors)
        if not numeric:  # codes of categories
            half[at] = 1.0 if X is None else max(1.0, float(np.abs(X[:, at]).max(initial=0.0)))
            continue
        ends = [scaler.interval(str(f.expr)) for f in numeric]
        if all(end is not None for end in ends):
            corners = [float(np.prod(corner)) for corner in product(*(e for e in ends if e))]
            low, high = np.full(len(at), min(corners)), np.full(len(at), max(corners))
        elif X is None:
            missing = next(str(f.expr) for f, end in zip(numeric, ends, strict=True) if end is None)
            raise InputError(
                f"ranges: expected the range of {missing!r}: type"
                f" Scaler(ranges={{{missing!r}: (low, high)}}), got none"
            )
        else:
            low, high = X[:, at].min(axis=0), X[:, at].max(axis=0)
            reach[at] = scaler.margin
        if pure and first is not None:
            center[at], half[at] = 0.5 * (low + high), 0.5 * (high - low)
        else:  # one scale for all categories, also for those that were not there yet
            size = np.maximum(np.abs(low), np.abs(high))
            half[at] = size if pure else size.max()
        _refuse_constant([names[index] for index in at], half[at], scaler)
    y0, unit = _response_scale(design, scaler, y)
    return replace(
        base, center=center, half=half, reach=reach, y0=y0, unit=unit, source=scaler.source
    )


def _refuse_constant(names: list[str], half: np.ndarray, scaler: Scaler) -> None:
    for name, size in zip(names, half, strict=True):
        if not size > 0:
            raise refused(
                name,
                "values that differ (a longer burn-in, or ranges={...} for it)",
                f"a constant in {scaler.source}",
            )


def _response_scale(design: Design, scaler: Scaler, y: np.ndarray | None) -> tuple[float, float]:
    """Origin and unit of the response, for families that allow them (Gaussian)."""
    ends = scaler.interval(design.target)
    if ends is None and y is not None:
        ends = float(y.min()), float(y.max())
    if ends is None or not ends[0] < ends[1]:
        return 0.0, 1.0
    if design.intercept is None:
        return 0.0, max(abs(ends[0]), abs(ends[1]))
    return 0.5 * (ends[0] + ends[1]), 0.5 * (ends[1] - ends[0])


def references_of(design: Design) -> list[str]:
    """Names of levels that have no column because their coefficient is 0 (treatment coding)."""
    found = []
    for factor, (kind, state) in design.spec.encoder_state.items():
        if getattr(kind, "value", None) != "categorical":
            continue
        present = {name.replace("[T.", "[") for name in design.names}
        coded = any(name.startswith(f"{factor}[T.") for name in design.names)
        for level in state.get("categories", ()):
            name = f"{factor}[{level}]"
            if coded and name not in present:
                found.append(name)
    return found
