"""Tables of every kind: pandas, polars, Arrow, or a mapping of columns; read block by block."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchglb.checks import check_text
from torchglb.errors import InputError
from torchglb.estimators.packages import needed

if TYPE_CHECKING:
    import pandas as pd

#: rows that are turned into numbers at a time: bounds the memory beside the table
BLOCK = 1 << 14


class TableError(InputError):
    """A value of a table was refused.

    Attributes:
        row: which, counted from 0 in the order in which the table has its rows; None if no single
            row is to blame.

    Example:
        >>> import torchglb as glb
        >>> data = {"x": [1.0, 2.0], "y": [0, 7]}
        >>> scaler = glb.estimators.Scaler(ranges={"x": (0, 3)})
        >>> try:
        ...     glb.glm("y ~ x", data, family="bernoulli", scaler=scaler)
        ... except TableError as refused:
        ...     refused.row
        1
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def refused(column: str, expected: str, got: object, row: int | None = None) -> TableError:
    """The sentence in which a value of a table is refused."""
    place = "" if row is None else f" in row {row}"
    return TableError(f"column {column!r}: expected {expected}, got {got}{place}", row)


class Table:
    """Columns by name, of whatever kind of frame; nothing is copied before it is asked for.

    Args:
        data: a pandas, polars or Arrow table, anything else that narwhals knows, or a mapping from
            names to columns.

    Example:
        >>> table = Table({"age": [31.0, 45.0], "arm": ["A", "B"]})
        >>> len(table), table.columns
        (2, ['age', 'arm'])
    """

    def __init__(self, data: Any) -> None:
        narwhals, errors = needed("narwhals"), needed("narwhals.exceptions")
        if isinstance(data, Mapping):
            try:
                data = needed("pandas").DataFrame(dict(data))
            except (TypeError, ValueError) as error:
                told = f"{type(data).__name__} ({error})"
                raise InputError(f"data: expected columns of one length, got {told}") from None
        try:
            self.frame = narwhals.from_native(data, eager_only=True)
            names = list(self.frame.columns)
        except errors.DuplicateError as error:
            told = " ".join(str(error).split())
            raise InputError(f"data: expected columns of different names, got: {told}") from None
        except TypeError:
            raise InputError(
                "data: expected a table (pandas, polars, Arrow, or a mapping from names to"
                f" columns), got {type(data).__name__}"
            ) from None
        self.columns: list[str] = names
        self.native = data

    def __len__(self) -> int:
        return int(self.frame.shape[0])

    def require(self, names: Iterable[str], where: str) -> None:
        """Refuses names that are no columns, with those that come close."""
        for name in names:
            check_text(where, name, "the name of a column")
            if name not in self.columns:
                close = difflib.get_close_matches(name, self.columns, 3)
                hint = f" (did you mean {', '.join(map(repr, close))}?)" if close else ""
                raise TableError(
                    f"{where}: expected a column of the table ({', '.join(self.columns)}),"
                    f" got {name!r}{hint}"
                )

    def values(self, name: str) -> np.ndarray:
        """A column as NumPy sees it."""
        return np.asarray(self.frame[name].to_numpy())

    def block(self, columns: Sequence[str], rows: slice | np.ndarray) -> pd.DataFrame:
        """Some rows of some columns, as the formula machinery takes them."""
        pandas = needed("pandas")
        taken = {}
        for name in columns:
            series = self.frame[name]
            part = series[rows] if isinstance(rows, slice) else series.gather_every(1)[rows]
            values = np.asarray(part.to_numpy())
            if values.dtype.kind == "c":
                raise refused(name, "real numbers", "complex ones")
            taken[name] = values
        return pandas.DataFrame(taken).infer_objects()

    def levels(self, name: str) -> list[Any] | None:
        """The levels that the type of a column declares; None where it declares none."""
        narwhals = needed("narwhals")
        series = self.frame[name]
        if isinstance(series.dtype, narwhals.Enum):
            return list(series.dtype.categories)
        if isinstance(series.dtype, narwhals.Categorical) and series.implementation.is_pandas():
            return series.cat.get_categories().to_list()
        return None

    def is_text(self, name: str) -> bool:
        """Whether a column holds words, not numbers."""
        dtype = self.frame[name].dtype
        return not (dtype.is_numeric() or dtype == needed("narwhals").Boolean)

    def like(self, columns: Mapping[str, Any]) -> Any:
        """A frame of the kind of this one, with other columns."""
        narwhals = needed("narwhals")
        backend = self.frame.implementation
        return narwhals.from_dict(dict(columns), backend=backend).to_native()


def times_of(table: Table, time: str) -> np.ndarray:
    """A column of times; texts must be numbers or dates, since by letters 10 is before 9."""
    table.require([time], "time")
    pandas, values = needed("pandas"), table.values(time)
    missing = np.flatnonzero(pandas.isna(values))
    if len(missing):
        raise refused(time, "a time in every row", "a missing value", int(missing[0]))
    texts = np.flatnonzero([isinstance(value, str) for value in values])
    if not len(texts):
        return values
    try:
        return values.astype(np.float64)
    except ValueError:
        dates = pandas.to_datetime(values, format="ISO8601", utc=True, errors="coerce")
    stray = np.flatnonzero(dates.isna())
    if len(stray):
        expected = "numbers, or dates such as 2026-01-31 or 2026-01-31T08:30"
        raise refused(time, expected, repr(values[stray[0]]), int(stray[0]))
    return np.asarray(dates.to_numpy())


def order_of(table: Table, time: str | None, after: Any = None) -> np.ndarray | None:
    """The rows in the order of their times, equal times as they stand; None: as they are.

    Args:
        table: the rows.
        time: the column with the times.
        after: the last time so far; an earlier one is refused.
    """
    if time is None:
        return None
    values = times_of(table, time)
    order = np.argsort(values, kind="stable")
    if after is not None and len(order) and values[order[0]] < after:
        early = int(order[0])
        raise refused(
            time, f"times from {after} on (rows are added in order)", values[early], early
        )
    return None if bool((order[1:] > order[:-1]).all()) else order


def blocks(
    table: Table, columns: Sequence[str], order: np.ndarray | None, start: int = 0
) -> Iterator[tuple[np.ndarray, pd.DataFrame]]:
    """The rows in order, block by block, with their places in the table."""
    for first in range(start, len(table), BLOCK):
        last = min(first + BLOCK, len(table))
        if order is None:
            yield np.arange(first, last), table.block(columns, slice(first, last))
        else:
            yield order[first:last], table.block(columns, order[first:last])


def without_missing(
    frame: pd.DataFrame, rows: np.ndarray, missing: str
) -> tuple[pd.DataFrame, np.ndarray]:
    """Refuses missing values by column and row, or drops their rows."""
    absent = frame.isna().to_numpy()
    if not absent.any():
        return frame, rows
    if missing != "drop":
        place = int(np.flatnonzero(absent.any(axis=1))[0])
        column = str(frame.columns[int(np.flatnonzero(absent[place])[0])])
        expected = "a value (or missing='drop', in a shell --missing drop, to leave such rows out)"
        raise refused(column, expected, "a missing value", int(rows[place]))
    keep = ~absent.any(axis=1)
    return frame[keep].reset_index(drop=True), rows[keep]


def numbers(values: Any, column: str, rows: np.ndarray, words: str = "") -> np.ndarray:
    """A column as float64; refuses words by their row.

    Args:
        values: of the column.
        column: its name.
        rows: their places in the table.
        words: what to type for a column of nothing but words.
    """
    array = np.asarray(values)
    if array.dtype.kind in "fiub":
        return array.astype(np.float64)
    if array.dtype.kind == "c":
        raise refused(column, "real numbers", "complex ones")
    if array.dtype.kind == "m":
        raise refused(column, "numbers (a span of time has no unit by itself)", array.dtype)
    found = np.full(len(array), np.nan)
    stray = None
    for index, value in enumerate(array):
        try:
            found[index] = float(value)
        except (TypeError, ValueError):
            stray = index if stray is None else stray
    if stray is not None:
        hint = f" (or {words})" if words and np.isnan(found).all() else ""
        raise refused(column, f"a number{hint}", repr(array[stray]), int(rows[stray]))
    return found


def finite(values: Any, column: str, rows: np.ndarray) -> np.ndarray:
    """:func:`numbers` that are finite; others are refused by their row."""
    found = numbers(values, column, rows)
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        raise refused(column, "finite numbers", found[bad[0]], int(rows[bad[0]]))
    return found
