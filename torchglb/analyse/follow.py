"""A CSV file that grows: complete lines are taken once, and what was taken may not change."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from torchglb.errors import InputError
from torchglb.simulate.files import write_bytes


@dataclass(frozen=True)
class Seen:
    """How much of a file was taken.

    Attributes:
        size: bytes, up to the end of a line.
        digest: their SHA-256.
    """

    size: int
    digest: str


class Follower:
    r"""Reads the complete lines of a growing file, and remembers which in another file.

    Args:
        path: of the CSV file.
        memory: a small JSON file; a watch that was interrupted goes on from there.

    Example:
        >>> _ = Path("clicks.csv").write_text("x,y\n1,0\n2,")
        >>> Follower(Path("clicks.csv"), Path("seen.json")).look()
        b'x,y\n1,0\n'
    """

    def __init__(self, path: Path, memory: Path) -> None:
        self.path, self.memory = path, memory
        self.seen = self._remembered()
        self._stamp: tuple[int, int] | None = None

    def look(self) -> bytes | None:
        """All complete lines of the file; None if it has not changed since the last look.

        Raises:
            InputError: if bytes that were taken have changed or vanished; what was written about
                them stays as it is.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            if self.seen.size:
                raise InputError(
                    f"{self.path}: expected the file that was watched, got none"
                ) from None
            return None
        stamp = (status.st_size, status.st_mtime_ns)
        if stamp == self._stamp:
            return None
        data = self.path.read_bytes()
        self._check(data)
        self._stamp = stamp
        return data[: data.rfind(b"\n") + 1]  # a half-written last line is waited for

    def remember(self, lines: bytes) -> None:
        """These lines are taken: results about them have been written."""
        seen = Seen(len(lines), hashlib.sha256(lines).hexdigest())
        table = {"file": self.path.name, "size": seen.size, "sha256": seen.digest}
        write_bytes(self.memory, json.dumps(table).encode())
        self.seen = seen

    def _check(self, data: bytes) -> None:
        size = self.seen.size
        if len(data) < size:
            raise InputError(
                f"{self.path}: expected at least the {size} bytes that were taken before, got"
                f" {len(data)}: rows have vanished"
            )
        if size and hashlib.sha256(data[:size]).hexdigest() != self.seen.digest:
            raise InputError(
                f"{self.path}: expected the rows that were taken before to stay as they were, got"
                " others: rows have changed. (Results so far are kept; to start anew, remove"
                f" {self.memory})"
            )

    def _remembered(self) -> Seen:
        try:
            table = json.loads(self.memory.read_bytes())
            seen = Seen(int(table["size"]), str(table["sha256"]))
        except FileNotFoundError:
            return Seen(0, "")
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.memory}: expected what an earlier watch wrote, got something else"
            ) from None
        if table["file"] != self.path.name:
            raise InputError(
                f"{self.memory}: expected a watch of {self.path.name!r}, got {table['file']!r}"
                " (take another --out)"
            )
        return seen
