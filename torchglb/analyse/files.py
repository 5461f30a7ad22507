"""Files with tables: CSV, Parquet, Arrow; and where in a file a row stands."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchglb.errors import InputError
from torchglb.estimators.packages import needed

ARROW = (".arrow", ".feather", ".ipc")
KINDS = ".csv, .parquet, .arrow, .feather or .ipc"


def read_table(path: Path) -> Any:
    r"""The table of a file, by the end of its name.

    Raises:
        InputError: where the file is missing, of another kind, or cannot be read.

    Example:
        >>> _ = Path("a.csv").write_text("x,y\n1,0\n2,1\n")
        >>> read_table(Path("a.csv")).shape
        (2, 2)
    """
    if not path.is_file():
        raise InputError(f"{path}: expected a file with a table ({KINDS}), got none")
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return parse_csv(path.read_bytes(), str(path))
    if suffix == ".parquet":
        reader = needed("pyarrow.parquet").read_table
    elif suffix in ARROW:
        reader = needed("pyarrow.feather").read_table
    else:
        raise InputError(f"{path}: expected a name that ends in {KINDS}, got {path.name!r}")
    broken = needed("pyarrow").ArrowInvalid
    try:
        return reader(path)
    except (broken, OSError) as error:
        raise InputError(f"{path}: expected a sound {suffix} file, got: {error}") from None


def parse_csv(data: bytes, name: str, words: Iterable[str] = ()) -> Any:
    """A CSV text with a line of names; refuses lines that have more cells than names.

    Args:
        data: the text.
        name: of the file.
        words: columns that hold words, even where all of these lines would pass for numbers.
    """
    pandas = needed("pandas")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{name}: expected UTF-8, got something else in line {line}") from None
    _check_lines(text, name)
    try:
        kinds = dict.fromkeys(words, str)
        return pandas.read_csv(io.StringIO(text), low_memory=False, dtype=kinds)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError) as error:
        raise InputError(f"{name}: expected a CSV table, got: {error}") from None


def _check_lines(text: str, name: str) -> None:
    """Every line has as many cells as there are names, and no name stands twice."""
    reader = csv.reader(io.StringIO(text))
    heads = next(reader, [])
    if not heads:
        raise InputError(f"{name}: expected a line with the names of the columns, got none")
    if len(heads) == 1 and (other := re.search("[;\t|]", heads[0])):
        raise InputError(
            f"{name}: expected commas between the cells, got {other.group()!r} in line 1; write it"
            f" with commas, or pass pandas.read_csv(..., sep={other.group()!r}) to torchglb.glm"
        )
    twice = [head for head in heads if heads.count(head) > 1]
    if twice:
        raise InputError(f"{name}: expected different names, got {twice[0]!r} twice in line 1")
    for cells in reader:
        if cells and len(cells) != len(heads):
            raise InputError(
                f"{name}: expected {len(heads)} cells in line {reader.line_num}, got {len(cells)}"
            )


def line_of(data: bytes, row: int) -> int | None:
    """The line of a CSV text on which a row, counted from 0, ends; empty lines hold no row."""
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig")))
    next(reader, None)
    at = -1
    for cells in reader:
        at += bool(cells)
        if at == row:
            return reader.line_num
    return None
