"""A run on disk: what was asked, what it ran on, and arrays that NumPy alone can read.

    config.json            the complete configuration
    manifest.json          versions, seed, device, commit, start and end; the SHA-256 of the others
    LABEL.npz              the results of a policy; identical for identical configurations
    timing/LABEL.npz       seconds per round, which never are
    states/                the states at the end, from which a run is extended to more rounds
    unfinished/            checkpoints and finished parts, until all of a policy is there

Whatever happens, a file that exists is whole (:mod:`torchglb.simulate.files`). What was damaged
later is refused by name. Records of earlier versions have no sums; theirs are the checks of ZIP.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torchglb.errors import InputError
from torchglb.random_streams import EARLIER_GENERATOR
from torchglb.simulate.files import (
    Arrays,
    UnsoundError,
    digest,
    pack,
    read_bytes,
    read_json,
    table_digest,
    unpack,
    write_bytes,
    write_json,
)

CONFIG, MANIFEST = "config.json", "manifest.json"
UNFINISHED, STATES, TIMING = "unfinished", "states", "timing"
#: what a label, which is the name of a file too, may look like
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")


class Record:
    """A directory with the results of a run.

    Attributes:
        directory: where it is.
        config: the configuration, in the form of a preset with nothing left out.
        manifest: versions, seed, random generator, device, commit if any, start and end.
        labels: of the policies whose results are complete, in the order of the configuration.

    Example:
        >>> from torchglb.simulate import simulate
        >>> record = simulate(["random"], horizon=20, replicates=2, S=[3.0], out="results/kept")
        >>> again = Record.open("results/kept")
        >>> again.labels, again.arrays("random")["regret"].shape
        (['random'], (1, 2, 20))
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        self.config = read_config(self.directory, self.manifest)
        self.labels = [label for label in self.config["policies"] if self._is_complete(label)]

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Record:
        """Opens a directory that a run has written.

        Raises:
            InputError: if it is not one, or if its files are damaged.
        """
        if not (Path(directory) / CONFIG).is_file():
            raise InputError(f"{directory}: expected the directory of a run, got no {CONFIG}")
        return cls(directory)

    @property
    def complete(self) -> bool:
        """Whether every policy has finished."""
        return self.labels == self.config["policies"]

    def arrays(self, label: str) -> Arrays:
        """The results of a policy, for nS radii, R replicates and T' recorded rounds.

        - ``rounds (T')``: the rounds after which values were recorded, at most 1000, the last
          among them; a run that was extended has up to 1000 of every stage;
        - ``regret (nS, R, T')``: cumulative, exact to every round whatever is recorded;
        - ``certificate (nS, R, T')``: what the run certifies about its own regret, on the event of
          the confidence sets; only for policies with a set;
        - ``missed (nS, R)``: whether theta* was outside the set in any recorded round;
        - ``on_boundary (nS, R)``: whether the observations refute ``|theta*| <= S`` at the end;
          only for policies that keep them;
        - ``passes (nS, R, T')``: passes over the history so far, where they are counted;
        - ``theta_star``, ``theta_hat (nS, R, d)``: the parameter and the last estimate;
        - ``boundary (nS, M, 2)``: of the last set of replicate 0; ``area (nS, R)``; for d = 2;
        - ``S``, ``kappa (nS)``;
        - ``seconds (T')``: of one round of the policy for the whole batch, on average since the
          round recorded before.

        Raises:
            InputError: if the label is unknown, or if one of its files is missing or damaged.
        """
        if label not in self.labels:
            known = ", ".join(self.labels) or "none"
            raise InputError(f"label: expected one of {known}, got {label!r}")
        results = _read(self.directory, self.manifest, f"{label}.npz")
        return results | _read(self.directory, self.manifest, f"{TIMING}/{label}.npz")

    def _is_complete(self, label: str) -> bool:
        found = self.manifest.get("results", {}).get(label)
        # a run that is being extended still has the results of what it was before
        size = {key: self.config[key] for key in ("horizon", "replicates")}
        fits = found is None or all(found[key] == value for key, value in size.items())
        return fits and (self.directory / f"{label}.npz").exists()

    def __repr__(self) -> str:
        return f"Record({str(self.directory)!r}, labels={self.labels})"


# ---- configuration and manifest --------------------------------------------------------------


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, if it is what was written."""
    manifest = read_json(directory / MANIFEST)
    found = manifest.pop("sha256", None)
    if found is not None and found != table_digest(manifest):
        raise UnsoundError(f"{directory / MANIFEST}: expected its SHA-256, got a damaged file")
    return {"generator": EARLIER_GENERATOR} | manifest


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest with its own sum."""
    write_json(directory / MANIFEST, manifest | {"sha256": table_digest(manifest)})


def read_config(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The configuration, if it is what was written."""
    path = directory / CONFIG
    config = read_json(path)
    expected = manifest.get("config")
    if expected is not None and table_digest(config) not in expected:
        raise UnsoundError(f"{path}: expected the SHA-256 in {MANIFEST}, got a damaged file")
    labels = config.get("policies")
    if not isinstance(labels, list):
        raise UnsoundError(f"{path}: expected a list of policies, got {labels!r}")
    for label in labels:  # which are names of files below the directory
        if not isinstance(label, str) or not LABEL.fullmatch(label):
            raise UnsoundError(f"{path}: expected labels that are names, got {label!r}")
    for key in ("horizon", "replicates"):
        if not isinstance(config.get(key), int):
            raise UnsoundError(f"{path}: expected an integer {key}, got {config.get(key)!r}")
    return config


# ---- results ---------------------------------------------------------------------------------


def write_results(
    directory: Path,
    manifest: dict[str, Any],
    label: str,
    arrays: Arrays,
    seconds: Arrays,
    size: dict[str, int],
) -> None:
    """Writes the results of a policy, and their sums into the manifest.

    The sums go first: results without sums would have to be trusted.
    """
    files = {f"{TIMING}/{label}.npz": pack(seconds), f"{label}.npz": pack(arrays)}
    sums = {name: digest(data) for name, data in files.items()}
    manifest.setdefault("results", {})[label] = size | {"sha256": sums}
    write_manifest(directory, manifest)
    for name, data in files.items():
        write_bytes(directory / name, data)


def _read(directory: Path, manifest: dict[str, Any], name: str) -> Arrays:
    path = directory / name
    data = read_bytes(path)
    label = path.name.removesuffix(".npz")
    expected = manifest.get("results", {}).get(label, {}).get("sha256", {}).get(name)
    if expected is not None and expected != digest(data):
        raise UnsoundError(f"{path}: expected the SHA-256 in {MANIFEST}, got a damaged file")
    return unpack(data, path)
