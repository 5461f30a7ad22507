"""The whole run: tasks from a configuration, executed, gathered and written down."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchglb.checks import check_choice, check_count, check_positive
from torchglb.errors import InputError
from torchglb.simulate.config import Configuration, make_family
from torchglb.simulate.executors import EXECUTORS, Watch
from torchglb.simulate.record import (
    PART,
    TIMING,
    UNFINISHED,
    Record,
    read_arrays,
    read_json,
    write_arrays,
    write_json,
)
from torchglb.simulate.runner import Task
from torchglb.theory import kappa

#: what must be the same for a run to be continued
VERSIONS = ("torchglb", "torch", "numpy")


def simulate(
    policies: Sequence[str] | Mapping[str, Mapping[str, Any]],
    environment: str = "time-varying",
    *,
    horizon: int,
    replicates: int,
    S: float | Sequence[float],
    out: str | os.PathLike[str] | None = None,
    executor: str = "serial",
    watch: Watch | None = None,
    workers: int | None = None,
    address: str | None = None,
    save_every: float = 20.0,
    **settings: Any,
) -> Record:
    """Plays policies against an environment, all replicates and radii as one batch.

    Args:
        policies: labels, or for each label a table of options (``policy`` names the policy if it
            is not the label).
        environment: one of :func:`torchglb.environments.available`.
        horizon: T.
        replicates: R for each S.
        S: the radius of the ball, or several.
        out: the directory of the record; if it holds an unfinished run of the same configuration,
            that one is continued. If left out, a temporary directory that is removed together with
            the record that is returned, or when the program ends.
        executor: ``"serial"`` (here), ``"processes"`` or ``"ray"``; the results are the same.
        watch: is told how far the tasks are.
        workers: of ``"processes"``.
        address: of the cluster, for ``"ray"``.
        save_every: seconds between checkpoints.
        settings: ``family``, ``delta``, ``seed``, ``dim``, ``arms``, ``theta``, ``chunk``,
            ``device``, ... as in a preset.

    Example:
        >>> record = simulate(["oracle", "random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> record.arrays("random")["regret"].shape
        (1, 2, 20)
    """
    tables = {} if not isinstance(policies, Mapping) else {k: dict(v) for k, v in policies.items()}
    table = {
        "policies": list(policies),
        "policy": tables,
        "environment": environment,
        "horizon": horizon,
        "replicates": replicates,
        "S": list(S) if isinstance(S, Sequence) else S,
        **settings,
    }
    config = Configuration.load(table)
    place = Path(tempfile.mkdtemp(prefix="torchglb-")) if out is None else Path(out)
    remove = partial(shutil.rmtree, place, ignore_errors=True)
    try:
        record = run(
            config,
            place,
            executor=executor,
            watch=watch,
            workers=workers,
            address=address,
            save_every=save_every,
        )
    except BaseException:
        if out is None:  # nobody else knows of it
            remove()
        raise
    if out is None:
        weakref.finalize(record, remove)
    return record


def run(
    config: Configuration,
    out: Path,
    *,
    executor: str = "serial",
    watch: Watch | None = None,
    workers: int | None = None,
    address: str | None = None,
    save_every: float = 20.0,
) -> Record:
    """Runs a configuration, or continues it, or opens its finished record.

    Raises:
        InputError: if the directory holds something else.
        RunError: if a task failed; the others have finished.
        KeyboardInterrupt: if it was interrupted; the same call continues.
    """
    check_choice("executor", executor, tuple(EXECUTORS))
    check_positive("save_every", save_every)
    if workers is not None:
        check_count("workers", workers, least=1)
    watch = Watch() if watch is None else watch
    config.try_out()
    with _sole_user(out):
        _prepare(config, out)
        tasks = [
            Task(str(out), config.as_dict(), label, chunk, save_every)
            for label in config.policy
            for chunk in range(len(config.chunks()))
            if not (out / f"{label}.npz").exists()
        ]
        if tasks:
            watch.begin(tasks)
            finish = _gatherer(config, out, tasks)
            done = [task for task in tasks if task.part.exists()]
            for task in done:
                watch.progress(task, config.horizon)
                finish(task)
            left = [task for task in tasks if task not in done]
            EXECUTORS[executor](left, watch, finish, workers=workers, address=address)
        manifest = read_json(out / "manifest.json")
        if "finished" not in manifest:
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)
            write_json(out / "manifest.json", manifest | {"finished": _now()})
    return Record.open(out)


def _prepare(config: Configuration, out: Path) -> None:
    """Writes configuration and manifest, or compares them with those of the run to continue."""
    versions = {
        "torchglb": _version("torchglb"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    if (out / "config.json").exists():
        found = config.differences(read_json(out / "config.json"))
        manifest = read_json(out / "manifest.json")
        if "finished" not in manifest:
            for name in VERSIONS:
                if manifest[name] != versions[name]:
                    found.append(f"{name}: {manifest[name]} there, {versions[name]} now")
        if found:
            raise InputError(
                f"{out}: holds a run of another configuration, which is never mixed with this one; "
                "choose another directory or remove this one. They differ in\n  "
                + "\n  ".join(found)
            )
        for torn in out.rglob(f".*{PART}"):  # by a process that was killed
            torn.unlink(missing_ok=True)
        return
    # a run may have been killed before it had written its configuration
    if any(p.name != "manifest.json" and not p.name.startswith(".") for p in out.iterdir()):
        raise InputError(f"{out}: expected a new or empty directory or that of a run, got another")
    manifest = versions | {
        "seed": config.seed,
        "device": config.device,
        "machine": platform.machine(),
        "commit": _commit(),
        "started": _now(),
    }
    # the configuration comes last: a directory that has one is complete
    write_json(out / "manifest.json", manifest)
    write_json(out / "config.json", config.as_dict())


def _gatherer(config: Configuration, out: Path, tasks: list[Task]) -> Callable[[Task], None]:
    """What to do when a task is finished: put a policy together once all its parts are there."""
    parts: dict[str, list[Task]] = {}
    for task in tasks:
        parts.setdefault(task.label, []).append(task)

    def finish(task: Task) -> None:
        mine = parts[task.label]
        if all(part.part.exists() for part in mine):
            arrays, seconds = _together(config, [read_arrays(part.part) for part in mine])
            write_arrays(out / TIMING / f"{task.label}.npz", {"seconds": seconds})
            write_arrays(out / f"{task.label}.npz", arrays)
            for part in mine:
                part.part.unlink(missing_ok=True)

    return finish


def _together(
    config: Configuration, parts: list[dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The arrays of a policy from those of its chunks."""
    shape = (len(config.S), config.replicates)
    found = {"rounds": parts[0]["rounds"], "S": np.array(config.S)}
    family = make_family(config.family)
    found["kappa"] = np.array([kappa(family, S) for S in config.S])
    for name in set(parts[0]) - {"rounds", "seconds"}:
        joined = np.concatenate([part[name] for part in parts])
        found[name] = joined if name == "boundary" else joined.reshape(*shape, *joined.shape[1:])
    return found, np.sum([part["seconds"] for part in parts], axis=0)


# ---- circumstances ---------------------------------------------------------------------------

LOCK = ".lock"


@contextlib.contextmanager
def _sole_user(out: Path) -> Iterator[None]:
    """Holds the directory: two runs at once would only do the same work twice."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{out}: expected no other run, got one that is writing there"
            ) from None
        yield


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _commit() -> str | None:
    """The commit of the library's source, if it is run from a repository."""
    place = Path(__file__).parent
    command = ["git", "-C", str(place), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
