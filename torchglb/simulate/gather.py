"""The results of a policy, put together from the parts of its tasks and from earlier stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from torchglb.simulate.config import Configuration, make_family
from torchglb.simulate.files import Arrays, UnsoundError, pack, read_sealed, unpack, write_sealed
from torchglb.simulate.record import UNFINISHED, Record, write_results
from torchglb.simulate.runner import Notice, Task, identity_of
from torchglb.theory import kappa

#: what is not an array over the elements
_SHARED = frozenset({"rounds", "seconds", "S", "kappa", "boundary"})


class Gatherer:
    """Knows which tasks a run still needs, and puts a policy together when its last one is done.

    Args:
        config: the run, with its stages.
        out: its directory.
        manifest: of the run; what is put together is entered there.
        made_by: the versions on which the numbers depend.
        notice: is told of files that are not sound.
    """

    def __init__(
        self,
        config: Configuration,
        out: Path,
        manifest: dict[str, Any],
        made_by: dict[str, str],
        notice: Notice,
    ) -> None:
        self._config, self._out, self._manifest = config, out, manifest
        self._made_by, self._notice = made_by, notice
        self._tasks: dict[str, list[Task]] = {}
        self._before: dict[str, Arrays] = {}  # results of the stage before, with as many rounds

    def tasks(self, save_every: float) -> list[Task]:
        """The tasks of those policies whose results are not there, or not sound."""
        table, chunks = self._config.as_dict(), self._config.chunks()
        for label in self._config.policy:
            if self._is_there(label):
                continue
            first = 0
            if (before := self._stage_before(label)) is not None:
                self._before[label] = before
                first = len(chunks) - self._added()
            self._tasks[label] = [
                Task(
                    str(self._out),
                    table,
                    label,
                    chunk,
                    save_every,
                    identity_of(self._config, label, chunks[chunk], self._made_by),
                )
                for chunk in range(first, len(chunks))
            ]
        return [task for mine in self._tasks.values() for task in mine]

    def _is_there(self, label: str) -> bool:
        if label not in Record(self._out).labels:
            return False
        try:
            Record(self._out).arrays(label)
        except UnsoundError as error:
            self._notice(f"{label}: put together again: {error}")
            return False
        return True

    def finish(self, task: Task) -> None:
        """A task is done: the policy is put together once all its parts are there."""
        mine = self._tasks[task.label]
        if not all(part.part.exists() for part in mine):
            return
        parts = [part.finished(self._notice) for part in mine]
        for part, arrays in zip(mine, parts, strict=True):
            if arrays is None:
                raise UnsoundError(f"{part.part}: expected a sound file, got a damaged one")
        whole = self._together(task.label, [part for part in parts if part is not None])
        size = {"horizon": self._config.horizon, "replicates": self._config.replicates}
        seconds = {"seconds": whole.pop("seconds")}
        write_results(self._out, self._manifest, task.label, whole, seconds, size)
        for part in mine:
            part.part.unlink(missing_ok=True)

    def _together(self, label: str, parts: list[Arrays]) -> Arrays:
        config, before = self._config, self._before.get(label)
        chunks = config.chunks()
        mine = [chunks[task.chunk] for task in self._tasks[label]]
        if before is not None:
            R0 = config.stages[-1][1]
            elements = [s * config.replicates + r for s in range(len(config.S)) for r in range(R0)]
            flat = {
                name: value if name in _SHARED else value.reshape(len(elements), *value.shape[2:])
                for name, value in before.items()
            }
            mine, parts = [elements, *mine], [flat, *parts]
        family = make_family(config.family)
        found = {
            "rounds": parts[0]["rounds"],
            "seconds": np.sum([part["seconds"] for part in parts], axis=0),
            "S": np.array(config.S),
            "kappa": np.array([kappa(family, S) for S in config.S]),
        }
        if "boundary" in parts[0]:
            found["boundary"] = np.concatenate([part["boundary"] for part in parts])
        order = np.argsort(np.concatenate(mine))
        for name in set(parts[0]) - _SHARED:
            joined = np.concatenate([part[name] for part in parts])[order]
            found[name] = joined.reshape(len(config.S), config.replicates, *joined.shape[1:])
        return found

    # ---- stages --------------------------------------------------------------------------

    def _added(self) -> int:
        """How many chunks the last stage has added."""
        R0, R = self._config.stages[-1][1], self._config.replicates
        return -(-len(self._config.S) * (R - R0) // self._config.chunk)

    def _stage_before(self, label: str) -> Arrays | None:
        """The results of the stage before, if they have as many rounds and are sound."""
        if not self._config.stages or self._config.stages[-1][0] != self._config.horizon:
            return None
        path = _kept(self._out, label)
        if not path.exists():
            return None
        try:
            return unpack(read_sealed(path, _identity_before(self._config, label)), path)
        except UnsoundError as error:
            self._notice(f"{label}: computed again: {error}")
            return None


def keep_stage(config: Configuration, out: Path) -> None:
    """Puts the results of a finished stage aside, before a configuration with more takes over."""
    if not config.stages or config.stages[-1][0] != config.horizon:
        return  # with more rounds every task goes on from its last state
    record = Record(out)
    for label in record.labels:
        arrays = pack(record.arrays(label))
        write_sealed(_kept(out, label), arrays, _identity_before(config, label))


def _kept(out: Path, label: str) -> Path:
    return out / UNFINISHED / f"{label}.before.npz"


def _identity_before(config: Configuration, label: str) -> str:
    return identity_of(config, label, [], {}) + f"-{config.stages}".replace(" ", "")
