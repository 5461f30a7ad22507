"""Files that are whole or absent, and sealed ones, which know what they are.

Every file is written beside its place, synchronised and renamed. A sealed file begins with a line
that has the SHA-256 of the rest and the identity of whom it belongs to: what was damaged, or was
made for something else, is never taken for sound.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchglb.errors import InputError

#: the end of the name of a file that is being written
PART = ".part"
#: the first word of a sealed file
_SEAL = b"torchglb-sealed-1"

Arrays = dict[str, np.ndarray]


class UnsoundError(InputError):
    """A file is damaged, or belongs to something else; the message names it."""


def digest(data: bytes) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def table_digest(table: Mapping[str, Any]) -> str:
    """The SHA-256 of a table of plain values, whatever the order of its keys."""
    return digest(json.dumps(table, sort_keys=True, ensure_ascii=False).encode())


# ---- bytes -----------------------------------------------------------------------------------


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file as a whole or not at all, also if the machine stops in between.

    Raises:
        OSError: which names the file; nothing is left beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        if os.name == "posix":  # the new name itself is in the directory
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        _remove(beside)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except BaseException:
        _remove(beside)
        raise


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # on a disk that is gone, which the first error says
        return


def read_bytes(path: Path) -> bytes:
    """Reads a file, or names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnsoundError(f"{path}: expected a file of a run, got {error.strerror}") from None


def write_sealed(path: Path, data: bytes, identity: str) -> None:
    """Writes a file that belongs to whoever has the identity."""
    whole = digest(identity.encode() + data).encode()
    write_bytes(path, b" ".join([_SEAL, whole, identity.encode()]) + b"\n" + data)


def read_sealed(path: Path, identity: str) -> bytes:
    """What was sealed in a file.

    Raises:
        UnsoundError: if a bit of it has changed, or if it belongs to someone else.
    """
    line, _, data = read_bytes(path).partition(b"\n")
    words = line.split(b" ")
    if len(words) != 3 or words[0] != _SEAL:
        raise UnsoundError(f"{path}: expected a sealed file, got a damaged one")
    if digest(words[2] + data).encode() != words[1]:
        raise UnsoundError(f"{path}: expected the SHA-256 in its first line, got a damaged file")
    if words[2] != identity.encode():
        raise UnsoundError(f"{path}: expected a file of this configuration, got one of another")
    return data


# ---- tables ----------------------------------------------------------------------------------


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Writes a table in a form that people read too."""
    write_bytes(path, (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Reads a table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsoundError(f"{path}: expected a JSON file of a run, got {error}") from None
    if not isinstance(table, dict):
        raise UnsoundError(f"{path}: expected a table, got {type(table).__name__}")
    return table


# ---- arrays ----------------------------------------------------------------------------------


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as the bytes of an ``.npz`` file; the same ones give the same bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: arrays[name] for name in sorted(arrays)})  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes, path: Path) -> Arrays:
    """The arrays of an ``.npz`` file; ``path`` is for the message alone.

    Raises:
        UnsoundError: if it is damaged.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # of zipfile, zlib, struct, tokenize: a flipped bit leads anywhere
        reason = f"{type(error).__name__}: {error}"
        raise UnsoundError(f"{path}: expected arrays, got a damaged file ({reason})") from None
