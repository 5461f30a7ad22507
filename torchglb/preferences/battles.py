"""Battles from a file or a table: who met whom, and who won.

Equal rows are merged as they come: 10^6 battles of 200 competitors are at most 19 900 rows.
"""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from torchglb.backend import Floats, Ints
from torchglb.checks import refuse
from torchglb.errors import InputError
from torchglb.preferences.bradley_terry import BattleRows

#: words for a result, beside the names of the columns, those of the competitors, and numbers
LEFT_WORDS = frozenset({"left", "a", "model_a", "win", "true"})
RIGHT_WORDS = frozenset({"right", "b", "model_b", "loss", "false"})
TIE_WORDS = frozenset({"tie", "draw", "tie (bothbad)", "bothbad", "both_bad", "tie_bothbad"})


class Columns(NamedTuple):
    """Which columns of a table say what."""

    left: str = "model_a"
    right: str = "model_b"
    winner: str = "winner"
    controls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Battles:
    """Who met whom how often, and who won.

    Attributes:
        names: of the competitors, K of them.
        rows: distinct rows with counts.
        controls: names of the controls, C of them.

    Example:
        >>> battles = battles_of(["x", "x"], ["y", "z"], [1.0, 0.5])
        >>> battles.names, len(battles)
        (('x', 'y', 'z'), 2)
    """

    names: tuple[str, ...]
    rows: BattleRows
    controls: tuple[str, ...] = ()

    def __len__(self) -> int:
        """The number of battles."""
        return round(float(self.rows.weight.sum()))

    def groups(self) -> Ints:
        """The number of each competitor's group, ``(K,)``; battles connect what is in one."""
        K, rows = len(self.names), self.rows
        graph = sparse.coo_array((np.ones(len(rows.left)), (rows.left, rows.right)), shape=(K, K))
        return csgraph.connected_components(graph, directed=False)[1].astype(np.int64)

    def counts(self) -> np.ndarray[Any, Any]:
        """How many battles each competitor had, ``(K,)``."""
        K, rows = len(self.names), self.rows
        both = np.concatenate([rows.left, rows.right])
        return np.bincount(both, np.concatenate([rows.weight, rows.weight]), K)


class Refused(Exception):
    """What is wrong with one battle, without its place."""


def outcome(text: object, left: str, right: str, columns: Columns) -> float:
    """1 if the left one won, 0 if the right one did, 1/2 for a tie, or a number in between.

    Raises:
        Refused: if it says none of that, or two of them: ``a`` where the right one is called a.
    """
    word = text.strip() if isinstance(text, str) else ""  # numbers are no names
    plain, readings = word.lower(), set()
    if word in (columns.left, left) or plain in LEFT_WORDS:
        readings.add(1.0)
    if word in (columns.right, right) or plain in RIGHT_WORDS:
        readings.add(0.0)
    if plain in TIE_WORDS:
        readings.add(0.5)
    try:
        number = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if 0.0 <= number <= 1.0:
        readings.add(number)
    if len(readings) == 1:
        return readings.pop()
    expected = f"{columns.left!r}, {columns.right!r}, 'tie', {left!r}, {right!r} or a number"
    both = ", which is the name of one competitor and says that the other one won, or a tie"
    got = f"{text!r}{both if readings else ''}"
    raise Refused(f"{columns.winner}: expected {expected} in [0, 1], got {got}")


class _Collector:
    """Takes battles one by one; keeps numbers only, and counts what it has seen before."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.place: dict[str, int] = {}
        self.left, self.right, self.won = array("q"), array("q"), array("d")
        self.count, self.controls = array("d"), array("d")
        self._seen: dict[tuple[Any, ...], int] = {}  # where equal battles are, without controls

    def add(self, battle: tuple[Any, ...]) -> None:
        """One battle: left, right, winner, controls.

        Raises:
            Refused: if it says nothing that can be used; nothing is then added.
        """
        known = self._seen.get(battle)
        if known is not None:
            self.count[known] += 1.0
            return
        left, right, winner, *controls = battle
        names = [name_of(left), name_of(right)]
        for column, name in zip((self.columns.left, self.columns.right), names, strict=True):
            if not name:
                raise Refused(f"{column}: expected a name, got nothing")
        if names[0] == names[1]:
            raise Refused(f"expected two different competitors, got {names[0]!r} against itself")
        numbers = [_control(k, v) for k, v in zip(self.columns.controls, controls, strict=True)]
        won = outcome(winner, names[0], names[1], self.columns)
        if not numbers:
            self._seen[battle] = len(self.left)
        for name in names:
            self.place.setdefault(name, len(self.place))
        self.left.append(self.place[names[0]])
        self.right.append(self.place[names[1]])
        self.won.append(won)
        self.count.append(1.0)
        self.controls.extend(numbers)

    def battles(self) -> Battles:
        if not self.left:
            raise refuse("battles", "at least one battle", "none")
        C = len(self.columns.controls)
        left, right = (np.frombuffer(v, np.int64) for v in (self.left, self.right))
        won, count = (np.frombuffer(v, np.float64) for v in (self.won, self.count))
        controls = np.frombuffer(self.controls, np.float64).reshape(len(left), C)
        rows = merged(left, right, controls, won, count)
        return Battles(tuple(self.place), rows, self.columns.controls)


def name_of(value: object) -> str:
    """The name of a competitor: 2.0 is 2, and what is missing has none."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    name = str(value).strip()
    return "" if name.lower() == "nan" else name


def _control(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise Refused(f"{name}: expected a finite number, got {value!r}")
    return number


def merged(left: Ints, right: Ints, controls: Floats, won: Floats, count: Floats) -> BattleRows:
    """Distinct rows with the smaller competitor on the left, their counts and wins.

    A battle seen from the other side is the same battle: its controls and its result are turned.
    """
    turned = left > right
    a, b = np.where(turned, right, left), np.where(turned, left, right)
    won = np.where(turned, 1.0 - won, won)
    sign = np.where(turned, -1.0, 1.0)[:, None]
    controls = controls * sign
    if controls.shape[1]:
        keys = np.column_stack([a, b, controls])
        _, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    else:
        code = a * (int(b.max()) + 1) + b
        _, first, place = np.unique(code, return_index=True, return_inverse=True)
    place = place.reshape(-1)
    weight = np.bincount(place, count).astype(np.float64)
    wins = np.bincount(place, count * won).astype(np.float64)
    return BattleRows(a[first], b[first], np.ascontiguousarray(controls[first]), weight, wins)


def battles_of(
    left: Sequence[Any],
    right: Sequence[Any],
    winner: Sequence[Any],
    controls: Mapping[str, Sequence[float]] | None = None,
) -> Battles:
    """Battles from columns.

    Args:
        left: names of the first competitors.
        right: of the second ones.
        winner: 1 if the first one won, 0 if the second one did, 1/2 for a tie; or words.
        controls: columns that count for the first and against the second.

    Example:
        >>> len(battles_of(["x", "y"], ["y", "z"], [1, 0.5]))
        2
    """
    given = dict(controls or {})
    columns = Columns("left", "right", "winner", tuple(given))
    sizes = {"left": len(left), "right": len(right), "winner": len(winner)}
    sizes |= {name: len(values) for name, values in given.items()}
    if len(set(sizes.values())) > 1:
        raise refuse("battles", "columns of one length", sizes)
    return _collected(columns, zip(left, right, winner, *given.values(), strict=True))


def battles_in(frame: Any, columns: Columns) -> Battles:
    """Battles from a DataFrame, or any table of columns by name."""
    wanted = [columns.left, columns.right, columns.winner, *columns.controls]
    try:
        known = list(frame.columns) if hasattr(frame, "columns") else list(frame)
        for name in wanted:
            if name not in known:
                raise refuse("frame", f"a column {name!r}", known)
        lists = [np.asarray(frame[name]).tolist() for name in wanted]
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        expected = "a DataFrame, a table of columns by name, or the path of a CSV file"
        raise refuse("frame", expected, f"{type(frame).__name__} ({error})") from None
    if len({len(values) for values in lists}) > 1:
        raise refuse("frame", "columns of one length", [len(values) for values in lists])
    return _collected(columns, zip(*lists, strict=True))


def _collected(columns: Columns, lines: Iterable[tuple[Any, ...]]) -> Battles:
    found = _Collector(columns)
    for number, battle in enumerate(lines):
        try:
            found.add(battle)
        except Refused as error:
            raise InputError(f"row {number}: {error}") from None
    return found.battles()


def read_battles(path: str | os.PathLike[str], columns: Columns) -> Battles:
    r"""Battles from a CSV file with a header.

    Raises:
        InputError: with the line and the column that are wrong.

    Example:
        >>> from pathlib import Path
        >>> lines = "model_a,model_b,winner\nx,y,model_a\ny,z,tie\n"
        >>> _ = Path("battles.csv").write_text(lines)
        >>> read_battles("battles.csv", Columns()).names
        ('x', 'y', 'z')
    """
    place = Path(path)
    try:
        with place.open(newline="", encoding="utf-8-sig") as file:
            return _read(csv.reader(file), place, columns)
    except OSError as error:
        raise InputError(f"{place}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{place}: not a CSV file in UTF-8: {error}") from None


def _read(lines: Any, place: Path, columns: Columns) -> Battles:
    header = [name.strip() for name in next(lines, [])]
    wanted = [columns.left, columns.right, columns.winner, *columns.controls]
    for name in wanted:
        if header.count(name) != 1:
            listed = ", ".join(header) or "an empty file"
            raise InputError(f"{place}:1: expected one column {name!r}, got {listed}")
    pick, width = itemgetter(*(header.index(name) for name in wanted)), len(header)
    found = _Collector(columns)
    for fields in lines:
        if not fields:  # an empty line
            continue
        try:
            if len(fields) != width:
                raise Refused(f"expected {width} fields, got {len(fields)}")
            found.add(pick(fields))
        except Refused as error:
            raise InputError(f"{place}:{lines.line_num}: {error}") from None
    return found.battles()
