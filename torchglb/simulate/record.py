"""A run on disk: what was asked, what it ran on, and arrays that NumPy alone can read.

    config.json            the complete configuration
    manifest.json          versions, seed, device, commit, start and end
    LABEL.npz              the results of a policy; identical for identical configurations
    timing/LABEL.npz       seconds per round, which never are
    unfinished/            checkpoints and finished parts, until all of a policy is there

Every file is written beside its place, synchronised and renamed: whatever happens, a file that
exists is whole.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchglb.errors import InputError

UNFINISHED, TIMING = "unfinished", "timing"
#: the end of the name of a file that is being written
PART = ".part"


class Record:
    """A directory with the results of a run.

    Attributes:
        directory: where it is.
        config: the configuration, in the form of a preset with nothing left out.
        manifest: versions, seed, device, commit if any, start and end.
        labels: of the policies whose results are complete, in the order of the configuration.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.config: dict[str, Any] = read_json(self.directory / "config.json")
        self.manifest: dict[str, Any] = read_json(self.directory / "manifest.json")
        self.labels = [label for label in self.config["policies"] if self._file(label).exists()]

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Record:
        """Opens a directory that a run has written.

        Raises:
            InputError: if it is not one.
        """
        if not (Path(directory) / "config.json").is_file():
            raise InputError(f"{directory}: expected the directory of a run, got no config.json")
        return cls(directory)

    @property
    def complete(self) -> bool:
        """Whether every policy has finished."""
        return self.labels == self.config["policies"]

    def arrays(self, label: str) -> dict[str, np.ndarray]:
        """The results of a policy, for nS radii, R replicates and T' recorded rounds.

        - ``rounds (T')``: the rounds after which values were recorded, at most 1000, the last
          among them;
        - ``regret (nS, R, T')``: cumulative, exact to every round whatever is recorded;
        - ``certificate (nS, R, T')``: what the run certifies about its own regret, on the event of
          the confidence sets; only for policies with a set;
        - ``missed (nS, R)``: whether theta* was outside the set in any recorded round;
        - ``passes (nS, R, T')``: passes over the history so far, where they are counted;
        - ``theta_star``, ``theta_hat (nS, R, d)``: the parameter and the last estimate;
        - ``boundary (nS, M, 2)``: of the last set of replicate 0; ``area (nS, R)``; for d = 2;
        - ``S``, ``kappa (nS)``;
        - ``seconds (T')``: of one round of the policy for the whole batch, on average since the
          round recorded before.
        """
        if label not in self.labels:
            known = ", ".join(self.labels) or "none"
            raise InputError(f"label: expected one of {known}, got {label!r}")
        found = read_arrays(self._file(label))
        return found | read_arrays(self.directory / TIMING / f"{label}.npz")

    def _file(self, label: str) -> Path:
        return self.directory / f"{label}.npz"

    def __repr__(self) -> str:
        return f"Record({str(self.directory)!r}, labels={self.labels})"


# ---- files -----------------------------------------------------------------------------------


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file as a whole or not at all, also if the machine stops in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}{PART}")
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


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Writes a table in a form that people read too."""
    write_bytes(path, (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Reads a table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a JSON file of a run, got {error}") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a table, got {type(table).__name__}")
    return table


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays; the same ones give the same bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: arrays[name] for name in sorted(arrays)})  # type: ignore[arg-type]
    write_bytes(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads arrays."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
