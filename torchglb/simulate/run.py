"""The whole run: tasks from a configuration, executed, gathered and written down."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from torchglb.checks import check_choice, check_count, check_positive, kind_of, refuse
from torchglb.errors import InputError
from torchglb.random_streams import GENERATOR
from torchglb.simulate.config import Configuration, RunSettings
from torchglb.simulate.executors import EXECUTORS, FINISHED, Watch
from torchglb.simulate.files import PART, table_digest, write_json
from torchglb.simulate.gather import Gatherer, keep_stage
from torchglb.simulate.record import (
    CONFIG,
    MANIFEST,
    UNFINISHED,
    Record,
    read_config,
    read_manifest,
    write_manifest,
)
from torchglb.simulate.runner import Task

#: what must be the same for a run to be continued
VERSIONS = ("torchglb", "torch", "numpy", "generator")


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
    **settings: Unpack[RunSettings],
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
            that one is continued, and a finished one is extended by policies, replicates or rounds
            that are new. If left out, a temporary directory that is removed together with
            the record that is returned, or when the program ends.
        executor: ``"serial"`` (here), ``"processes"`` or ``"ray"``; the results are the same.
        watch: is told how far the tasks are.
        workers: of ``"processes"``.
        address: of the cluster, for ``"ray"``.
        save_every: seconds between checkpoints.
        settings: ``family``, ``delta``, ``seed``, ``dim``, ``arms``, ``theta``, ``chunk``,
            ``device``, ... as in a preset (:class:`torchglb.simulate.config.RunSettings`).

    Example:
        >>> record = simulate(["oracle", "random"], horizon=20, replicates=2, S=[3.0], seed=1)
        >>> record.arrays("random")["regret"].shape
        (1, 2, 20)
    """
    if isinstance(policies, str):
        raise refuse("policies", f"a list of labels, such as [{policies!r}]", repr(policies))
    tables = dict(policies) if isinstance(policies, Mapping) else {}
    for label, options in tables.items():
        if not isinstance(options, Mapping):
            raise refuse(f"policies[{label!r}]", "a table of options, such as {}", repr(options))
    table = {
        "policies": list(policies),
        "policy": {label: dict(options) for label, options in tables.items()},
        "environment": environment,
        "horizon": horizon,
        "replicates": replicates,
        "S": list(S) if isinstance(S, Sequence) else S,
        **settings,
    }
    config = Configuration.load(table)
    if not isinstance(out, str | os.PathLike | None):
        raise refuse("out", "the path of a directory, or None", repr(out))
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
    out: Path | str,
    *,
    executor: str = "serial",
    watch: Watch | None = None,
    workers: int | None = None,
    address: str | None = None,
    save_every: float = 20.0,
) -> Record:
    """Runs a configuration, or continues it, or extends it, or opens its finished record.

    A finished run is extended if more policies, replicates or rounds are asked for and all else is
    the same: what is new is computed and joined, what is there is kept.

    Raises:
        InputError: if the directory holds something else.
        RunError: if a task failed; the others have finished.
        KeyboardInterrupt: if it was interrupted; the same call continues.

    Example:
        >>> table = {
        ...     "family": "bernoulli", "environment": "fixed", "arms": 5, "S": 3.0,
        ...     "horizon": 10, "replicates": 2, "policies": ["random"],
        ... }
        >>> record = run(Configuration.load(table), "results/mine")
        >>> record.arrays("random")["regret"].shape
        (1, 2, 10)
    """
    check_choice("executor", executor, tuple(EXECUTORS))
    check_positive("save_every", save_every)
    if workers is not None:
        check_count("workers", workers, least=1)
    watch = Watch() if watch is None else watch
    if not isinstance(watch, Watch):
        raise refuse("watch", "a torchglb.simulate.Watch or None", kind_of(watch))
    if address is not None and executor != "ray":
        raise refuse("address", "executor 'ray', which alone has one", f"executor {executor!r}")
    config.try_out()
    out = Path(out)
    with _sole_user(out):
        whole, manifest = _prepare(config, out)
        made_by = {name: manifest[name] for name in VERSIONS}
        gatherer = Gatherer(whole, out, manifest, made_by, watch.notice)
        tasks = gatherer.tasks(save_every)
        if tasks:
            watch.begin(tasks)
            try:
                left = _take_finished(tasks, gatherer, watch)
                EXECUTORS[executor](left, watch, gatherer.finish, workers=workers, address=address)
            finally:
                watch.end()
        if (tasks or "finished" not in manifest) and Record(out).complete:
            write_manifest(out, manifest | {"finished": _now()})
            shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    return Record.open(out)


def _take_finished(tasks: list[Task], gatherer: Gatherer, watch: Watch) -> list[Task]:
    """Uses the parts that are there already; returns the tasks that are left."""
    left = []
    for task in tasks:
        if task.finished(watch.notice) is None:
            left.append(task)
            continue
        watch.progress(task, task.horizon)
        watch.state(task, FINISHED)
        gatherer.finish(task)
    return left


def _prepare(config: Configuration, out: Path) -> tuple[Configuration, dict[str, Any]]:
    """Writes configuration and manifest, or compares them with those of the run that is there.

    Returns:
        The configuration of the directory, which may have more policies, and the manifest.
    """
    made_by = {
        "torchglb": _version("torchglb"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "generator": GENERATOR,
    }
    for torn in out.rglob(f".*{PART}"):  # of a process that was killed while it wrote
        torn.unlink(missing_ok=True)
    if (out / CONFIG).exists():
        return _go_on(config, out, made_by)
    allowed = {LOCK, MANIFEST}
    if any(path.name not in allowed for path in out.iterdir()):
        raise InputError(f"{out}: expected a new or empty directory or that of a run, got another")
    manifest = made_by | {
        "seed": config.seed,
        "device": config.device,
        "machine": platform.machine(),
        "commit": _commit(),
        "started": _now(),
    }
    _write(config, manifest, out)
    return config, manifest


def _go_on(
    config: Configuration, out: Path, made_by: dict[str, str]
) -> tuple[Configuration, dict[str, Any]]:
    """The run that is there, extended if it is finished and more is asked for."""
    manifest = read_manifest(out)
    there = Configuration.load(read_config(out, manifest))
    refused = config.extends(there)
    size, size_there = (config.horizon, config.replicates), (there.horizon, there.replicates)
    more = size != size_there or not config.policy.keys() <= there.policy.keys()
    finished = "finished" in manifest and Record(out).complete
    if more and not finished:
        refused = config.differences(there) or refused
    if more or not finished:
        for name in VERSIONS:
            if manifest[name] != made_by[name]:
                refused.append(f"{name}: {manifest[name]} there, {made_by[name]} now")
    if refused:
        raise InputError(
            f"{out}: holds a run of another configuration, which is never mixed with this one; "
            "choose another directory or remove this one. A finished run can get more policies, "
            "replicates or rounds. They differ in\n  " + "\n  ".join(refused)
        )
    if not more:
        return there, manifest
    whole = config.grown_from(there)
    keep_stage(whole, out)
    manifest["extended"] = [*manifest.get("extended", []), _now()]
    _write(whole, manifest, out)
    return whole, manifest


def _write(config: Configuration, manifest: dict[str, Any], out: Path) -> None:
    """Writes the manifest, then the configuration: a directory that has one is complete.

    The sum of the configuration before is kept, in case that the run is killed in between.
    """
    manifest["config"] = [*manifest.get("config", [])[-1:], table_digest(config.as_dict())]
    write_manifest(out, manifest)
    write_json(out / CONFIG, config.as_dict())


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
