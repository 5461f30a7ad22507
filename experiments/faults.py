"""What a run loses when things go wrong: nothing, and it says what happened.

    python experiments/faults.py [--times 20] [--seed 0]

Every fault is brought about for real, at random moments: processes are killed with SIGKILL, a file
system is full, bits of files are flipped. Afterwards the same command is given again until it
succeeds, and its results are compared with those of an undisturbed run, byte by byte. What cannot
be continued has to be refused by a message that names the file. A POSIX system is needed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from torchglb.errors import InputError, RunError
from torchglb.report.tables import aligned
from torchglb.simulate import Record, Watch, runner, simulate
from torchglb.simulate.runner import Task

SETTINGS: dict[str, Any] = {
    "policies": ["ofuglb", "ofuglb-e", "random"],
    "horizon": 100,
    "replicates": 2,
    "S": [3.0, 5.0],
    "arms": 5,
    "chunk": 2,
    "seed": 7,
}
IDENTICAL = "nothing"


class Outcome(NamedTuple):
    """What came of a fault.

    Attributes:
        fault: what was done.
        times: how often.
        lost: what the results lack, compared with an undisturbed run.
        said: the messages, one of each kind, with file names for paths.
    """

    fault: str
    times: int
    lost: str
    said: list[str]


class Log(Watch):
    """Writes notices to a file, where they survive the process; and who is at work."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")

    def progress(self, task: Task, rounds: int) -> None:
        workers = [str(worker.pid) for worker in multiprocessing.active_children()]
        self._write(f"workers {' '.join(workers)}")

    def notice(self, text: str) -> None:
        self._write(f"said {text}")

    def said(self) -> list[str]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [line.removeprefix("said ") for line in lines if line.startswith("said ")]


def results(out: Path) -> dict[str, bytes]:
    """The bytes of all results."""
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.npz"))}


def go(
    out: Path,
    log: Log,
    executor: str = "serial",
    save_every: float = 0.1,
    workers: int = 2,
    **changes: Any,
) -> Record:
    """The command: it starts, continues or extends the run in a directory."""
    runner.REPORT_EVERY = 0.005
    settings = SETTINGS | changes
    return simulate(
        **settings, out=out, executor=executor, workers=workers, save_every=save_every, watch=log
    )


def lost(out: Path, expected: dict[str, bytes]) -> str:
    """What is not as it should be."""
    found = results(out)
    wrong = sorted(name for name in expected if found.get(name) != expected[name])
    return ", ".join(wrong) or IDENTICAL


# ---- killing ---------------------------------------------------------------------------------


def start(out: Path, log: Log, executor: str, workers: int) -> int:
    """The command in a process of its own; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # a server of workers that the parent may have is not this process's child
        forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
        go(out, log, executor, workers=workers)
        code = 0
    except BaseException as error:
        log.notice(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def ended(pid: int) -> int | None:
    """The exit code of a process, None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def strike(parent: int, log: Path, victims: str, chance: random.Random) -> bool:
    """Kills the parent, one of its workers, or first a worker and then the parent."""
    if victims in ("worker", "both"):
        named = [line for line in lines(log) if line.startswith("workers ")]
        alive = [pid for pid in map(int, named[-1].split()[1:]) if is_alive(pid)] if named else []
        if not alive:
            return False
        os.kill(chance.choice(alive), signal.SIGKILL)
    if victims in ("parent", "both"):
        os.kill(parent, signal.SIGKILL)
    return True


def killed(
    victims: str,
    executor: str,
    times: int,
    expected: dict[str, bytes],
    chance: random.Random,
    workers: int = 2,
) -> Outcome:
    """Kills at random moments, so many times in all, and always goes on afterwards."""
    fault = f"{victims} killed ({executor})"
    said: set[str] = set()
    strikes, damage = 0, IDENTICAL
    while strikes < times:
        with directory() as place:
            out, log = place / "run", Log(place / "log")
            code = None
            while code != 0:
                parent = start(out, log, executor, workers)
                hits, code = disturb(parent, place / "log", victims, times - strikes, chance)
                strikes += hits
                if code not in (0, -signal.SIGKILL):
                    return Outcome(fault, strikes, f"exit code {code}", log.said())
            damage = damage if damage != IDENTICAL else lost(out, expected)
            said |= set(log.said())
    return Outcome(fault, strikes, damage, kinds(said))


def disturb(
    parent: int, log: Path, victims: str, most: int, chance: random.Random
) -> tuple[int, int]:
    """Strikes once or twice after the first news; returns how often, and the exit code."""
    before, hits = len(lines(log)), 0
    due = None
    while (code := ended(parent)) is None:
        if due is None and len(lines(log)) > before:  # now there is something to lose
            due = time.monotonic() + chance.uniform(0.0, 0.6)
        if due is not None and time.monotonic() >= due and hits < min(2, most):
            hits += strike(parent, log, victims, chance)
            due += chance.uniform(0.0, 0.6)
        time.sleep(0.005)
    return hits, code


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class IdleKiller(Log):
    """Kills a worker that has just become idle, before the next task is sent to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.strikes = 0

    def state(self, task: Task, state: str) -> None:
        if state != "finished" or self.strikes == 2:
            return
        workers = multiprocessing.active_children()
        while not (idle := [one for one in workers if state_of(one.pid) == "S"]):
            time.sleep(0.01)  # until it waits for a message
        idle[0].kill()
        idle[0].join()
        self.strikes += 1


def state_of(pid: int | None) -> str:
    """R for a running process, S for one that waits, Z for a dead one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_alive(pid: int) -> bool:
    return state_of(pid) != "Z"


def killed_idle(expected: dict[str, bytes], workers: int = 2) -> Outcome:
    """A worker dies between two tasks, when the next is about to be sent to it."""
    with directory() as place:
        log = IdleKiller(place / "log")
        go(place / "run", log, "processes", workers=workers)
        return Outcome(
            "worker killed between tasks",
            log.strikes,
            lost(place / "run", expected),
            kinds(log.said()),
        )


# ---- no space --------------------------------------------------------------------------------


@contextmanager
def little_space(place: Path) -> Iterator[str]:
    """A directory with little space: a full file system, or without the right to mount, a limit."""
    kilobytes = 24
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if mounted:
        try:
            yield "disk full"
        finally:
            subprocess.run(["umount", str(place)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes << 9, hard))
    try:
        yield "files too large (limit)"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def no_space(expected: dict[str, bytes]) -> Outcome:
    """The disk is full while tasks run; later there is space, and the command is given again."""
    with directory() as place:
        out, log = place / "run", Log(place / "log")
        with little_space(out) as fault:
            try:
                go(out, log)
                return Outcome(fault, 1, "nothing went wrong: too much space", log.said())
            except (RunError, OSError) as error:
                said = str(error).splitlines()
            torn = [path.name for path in out.rglob("*.part")]
            if torn:
                return Outcome(fault, 1, f"left behind: {torn}", said)
            kept = place / "kept"
            shutil.copytree(out, kept)
        go(kept, log)
        found = lost(kept, expected)
        return Outcome(fault, 1, found, kinds([*log.said(), *said[-1:]]))


# ---- damaged files ---------------------------------------------------------------------------


class Stop(Log):
    """Interrupts in the middle of the second policy."""

    def progress(self, task: Task, rounds: int) -> None:
        if task.label == SETTINGS["policies"][1] and rounds > 40:
            os.kill(os.getpid(), signal.SIGINT)


def unfinished(place: Path) -> Path:
    """A run that was stopped in the middle, with checkpoints, parts and results."""
    try:
        go(place / "run", Stop(place / "log"), save_every=0.005)
    except KeyboardInterrupt:
        return place / "run"
    raise RuntimeError("the run was not interrupted")


def flip(path: Path, chance: random.Random) -> None:
    """Turns one bit of a file over."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(data))


def damaged(
    fault: str,
    made: Path,
    expected: dict[str, bytes],
    times: int,
    damage: Callable[[list[Path], random.Random], Path],
    chance: random.Random,
    **changes: Any,
) -> Outcome:
    """Damages a file of a run, then continues, extends and reads it."""
    said: set[str] = set()
    worst = IDENTICAL
    for _ in range(times):
        with directory() as place:
            out, log = place / "run", Log(place / "log")
            shutil.copytree(made, out)
            files = sorted(p for p in out.rglob("*") if p.is_file() and p.stat().st_size)
            victim = damage(files, chance)
            try:
                record = go(out, log, **changes)
                for label in record.labels:
                    record.arrays(label)
                if worst == IDENTICAL:
                    worst = lost(out, expected)
            except InputError as error:
                log.notice(str(error))
                if victim.name not in str(error):
                    worst = f"an error that does not name {victim.name}: {error}"
            said |= set(log.said())
    return Outcome(fault, times, worst, kinds(said))


def flipped_anywhere(files: list[Path], chance: random.Random) -> Path:
    victim = chance.choice(files)
    flip(victim, chance)
    return victim


def flipped_checkpoint(files: list[Path], chance: random.Random) -> Path:
    return flipped_anywhere([path for path in files if path.suffix == ".pt"], chance)


def cut(files: list[Path], chance: random.Random) -> Path:
    victim = chance.choice([path for path in files if "unfinished" in path.parts])
    data = victim.read_bytes()
    victim.write_bytes(data[: chance.randrange(len(data))])
    return victim


def foreign(other: Path) -> Callable[[list[Path], random.Random], Path]:
    """Puts the checkpoints of another run in the place of those of this one."""

    def damage(files: list[Path], chance: random.Random) -> Path:
        names = {path.name: path for path in (other / "unfinished").glob("*.pt")}
        theirs = [path for path in files if "unfinished" in path.parts and path.name in names]
        for victim in theirs:
            shutil.copy(names[victim.name], victim)
        return theirs[0]

    return damage


def removed(files: list[Path], chance: random.Random) -> Path:
    victim = chance.choice([path for path in files if "timing" in path.parts])
    victim.unlink()
    return victim


# ---- the table -------------------------------------------------------------------------------


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchglb-faults-") as name:
        yield Path(name)


def kinds(messages: Any) -> list[str]:
    """One message of each kind, with file names in the place of paths."""
    found: dict[str, str] = {}
    for message in sorted(messages):
        words = (w.rsplit("/", 1)[-1].replace("'", "") if "/" in w else w for w in message.split())
        text = " ".join(words)
        key = "".join(c for c in text.partition(": ")[2] if c.isalpha() or c == " ")[:40]
        found.setdefault(key, text)
    return sorted(found.values())


def faults(times: int, seed: int) -> Iterator[Outcome]:
    """All of them, one after the other."""
    chance = random.Random(seed)
    with directory() as place:
        undisturbed = results(go(place / "undisturbed", Log(place / "log")).directory)
        yield killed("parent", "serial", times, undisturbed, chance)
        for victims in ("parent", "worker", "both"):
            yield killed(victims, "processes", times, undisturbed, chance)
        yield killed_idle(undisturbed)
        yield no_space(undisturbed)
        (place / "here").mkdir()
        half = unfinished(place / "here")
        yield damaged(
            "bit flipped in an unfinished run", half, undisturbed, times, flipped_anywhere, chance
        )
        yield damaged(
            "bit flipped in a checkpoint", half, undisturbed, times, flipped_checkpoint, chance
        )
        yield damaged("file of an unfinished run cut short", half, undisturbed, times, cut, chance)
        whole = place / "undisturbed"
        yield damaged(
            "bit flipped in a finished run", whole, undisturbed, times, flipped_anywhere, chance
        )
        yield damaged("timing removed", whole, undisturbed, 3, removed, chance)
        more: dict[str, Any] = {"horizon": 150}
        shutil.copytree(whole, place / "longer")
        longer = results(go(place / "longer", Log(place / "log"), **more).directory)
        yield damaged(
            "bit flipped, then extended", whole, longer, times, flipped_checkpoint, chance, **more
        )
        (place / "there").mkdir()
        SETTINGS["seed"] += 1
        try:
            other = unfinished(place / "there")
        finally:
            SETTINGS["seed"] -= 1
        yield damaged("checkpoint of another seed", half, undisturbed, 5, foreign(other), chance)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--times", type=int, default=20, help="how often each fault is brought about"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places")
    given = parser.parse_args()
    rows, sound = [["fault", "times", "lost", "said"]], True
    for outcome in faults(given.times, given.seed):
        sound &= outcome.lost == IDENTICAL
        said = outcome.said or ["-"]
        rows.append([outcome.fault, str(outcome.times), outcome.lost, said[0][:110]])
        rows += [["", "", "", text[:110]] for text in said[1:]]
        print(f"{outcome.fault}: {outcome.lost}", file=sys.stderr)
    print("\n".join(aligned(rows, justify="left")))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
