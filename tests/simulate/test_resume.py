"""Stopped in every way and continued, run anywhere: the arrays are the same, bit by bit."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import torchglb as glb
from torchglb import policies
from torchglb.errors import RunError
from torchglb.simulate import Configuration, Record, Watch, executors, runner, simulate
from torchglb.simulate.files import write_bytes
from torchglb.simulate.record import read_manifest, write_manifest
from torchglb.simulate.runner import Play

SETTINGS = dict(horizon=40, replicates=2, S=[3.0, 5.0], arms=5, chunk=3, seed=7)
LABELS = ["ofuglb", "evill"]


def files(directory):
    """The bytes of the results: everything that must not depend on how the run went."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.npz"))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    return files(simulate(LABELS, **SETTINGS, out=out).directory)


# ---- the state of a task ---------------------------------------------------------------------


ALL = [*policies.available(glb.Bernoulli()), "oful"]


def assert_continues(name, environment, horizon, breaks):
    family = "gaussian" if name == "oful" else "bernoulli"
    table = dict(policies=[name], family=family, environment=environment, horizon=horizon)
    config = Configuration.load(SETTINGS | table)
    straight, broken = Play(config, name, 0), Play(config, name, 0)
    while not straight.finished:
        straight.step()
    while not broken.finished:
        broken.step()
        if broken.t in breaks:
            saved = broken.checkpoint()
            broken = Play(config, name, 0)
            broken.load(saved)
    expected, found = straight.result(), broken.result()
    assert expected.keys() == found.keys()
    for key in expected.keys() - {"seconds"}:
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)


@pytest.mark.parametrize("environment", ["time-varying", "fixed"])
@pytest.mark.parametrize("name", ALL)
def test_a_saved_state_continues_bit_by_bit(name, environment):
    assert_continues(name, environment, 24, (1, 11, 12))


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["time-varying", "fixed"])
@pytest.mark.parametrize("name", ALL)
def test_a_saved_state_continues_bit_by_bit_for_long(name, environment):
    """Over the growth of buffers, the return of anchors, and refreshed inverses."""
    assert_continues(name, environment, 300, (60, 64, 65, 129, 200, 257, 258))


# ---- stopped and continued -------------------------------------------------------------------


class Stopper(Watch):
    """Presses Ctrl-C after some reports."""

    def __init__(self, after):
        self.left = after

    def progress(self, task, rounds):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_leaves_a_state_to_continue(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "REPORT_EVERY", 0.0)
    out = tmp_path / "run"
    stops = 0
    while stops < 20:
        try:
            record = simulate(LABELS, **SETTINGS, out=out, watch=Stopper(after=37))
            break
        except KeyboardInterrupt:
            stops += 1
            assert not Record.open(out).complete
    assert stops >= 4  # 160 rounds, 37 or fewer at a time
    assert record.complete
    assert files(out) == undisturbed
    assert not (out / "unfinished").exists()


COMMAND = """
import sys
from torchglb.simulate import runner, simulate
if __name__ == "__main__":
    runner.REPORT_EVERY = 0.01
    simulate({labels}, **{settings}, out={out!r}, executor={executor!r}, workers=2, save_every=0.02)
"""


def start(tmp_path, out, executor):
    script = tmp_path / "command.py"
    script.write_text(
        COMMAND.format(labels=LABELS, settings=SETTINGS, out=str(out), executor=executor)
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True
    )


def killed_three_times(tmp_path, undisturbed, executor):
    out, kills = tmp_path / "run", 0
    chance = random.Random(5)
    while kills < 3:
        process = start(tmp_path, out, executor)
        before = {p: p.stat().st_mtime_ns for p in out.glob("unfinished/*")}
        deadline = time.monotonic() + 300
        # until it has begun to write
        while time.monotonic() < deadline and process.poll() is None:
            now = {p: p.stat().st_mtime_ns for p in out.glob("unfinished/*.[pn]*") if p.exists()}
            if any(before.get(path) != when for path, when in now.items()):
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.1))
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr.read()
            break
        process.kill()
        process.wait()
        process.stderr.close()
        kills += 1
    process = start(tmp_path, out, executor)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert files(out) == undisturbed
    return kills


@pytest.mark.slow  # test_faults.py kills more often what it need not start afresh
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_killed_at_random_moments_the_arrays_are_the_same(undisturbed, tmp_path, executor):
    assert killed_three_times(tmp_path, undisturbed, executor) == 3


def test_a_torn_file_is_never_seen(tmp_path, monkeypatch):
    """A write that fails half-way leaves the old file whole."""
    path = tmp_path / "state"
    write_bytes(path, b"old")

    def broken(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="no space left on device: .*state"):
        write_bytes(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["state"]


def test_killed_before_the_configuration_was_written(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "manifest.json").write_text("{}")
    (out / ".config.json.123.part").write_text("{")
    assert simulate(["random"], **SETTINGS, out=out).complete


def test_killed_before_the_last_lines(tmp_path):
    """All results are there, and nobody has tidied up."""
    out = tmp_path / "run"
    simulate(["random"], **SETTINGS, out=out)
    manifest = read_manifest(out)
    ended = manifest.pop("finished")
    write_manifest(out, manifest)
    (out / "unfinished").mkdir()
    (out / "unfinished" / ".random.0.pt.123.part").write_text("torn")
    (out / "unfinished" / "random.0.npz").write_text("left over")
    before = files(out)
    record = simulate(["random"], **SETTINGS, out=out)
    assert files(out) == before
    assert record.manifest["finished"] >= ended
    assert not (out / "unfinished").exists()


def test_other_versions_do_not_continue_a_run(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate(["random"], **SETTINGS, out=out, watch=Stopper(after=1))
    write_manifest(out, read_manifest(out) | {"torch": "1.0.0"})
    with pytest.raises(glb.InputError, match="torch: 1.0.0 there"):
        simulate(["random"], **SETTINGS, out=out)


def test_two_runs_at_once_are_refused(tmp_path):
    class Rival(Watch):
        refused = None

        def begin(self, tasks):
            with pytest.raises(glb.InputError, match="got one that is writing there"):
                simulate(["random"], **SETTINGS, out=tmp_path)
            self.refused = True

    rival = Rival()
    simulate(["random"], **SETTINGS, out=tmp_path, watch=rival)
    assert rival.refused


# ---- executors -------------------------------------------------------------------------------


class Murderer(Watch):
    """Kills the workers once one has got going, and before them the server that forks them."""

    def __init__(self, server=False):
        self.notices = []
        self.done = False
        self._server = server

    def progress(self, task, rounds):
        if rounds > 0 and not self.done:
            self.done = True
            if self._server:
                servers = [p for p in Path("/proc").glob("[0-9]*") if is_server(p)]
                assert len(servers) == 1
                os.kill(int(servers[0].name), signal.SIGKILL)
            for child in multiprocessing.active_children():
                child.kill()

    def notice(self, text):
        self.notices.append(text)


def is_server(process):
    """Whether a process, by its directory in /proc, is the child of this one that forks workers."""
    try:
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        return (
            parent == os.getpid()
            and "multiprocessing.forkserver" in (process / "cmdline").read_text()
        )
    except OSError:
        return False


@pytest.mark.slow  # test_faults.py kills one worker after the other
@pytest.mark.parametrize("server", [False, True])
def test_two_workers_of_which_some_die(server, undisturbed, tmp_path):
    if server and sys.platform != "linux":
        pytest.skip("workers are not forked from a server here")
    watch = Murderer(server)
    out = tmp_path / "run"
    simulate(
        LABELS, **SETTINGS, out=out, executor="processes", workers=2, watch=watch, save_every=0.1
    )
    assert files(out) == undisturbed
    assert watch.done
    assert any("going on from its last checkpoint" in text for text in watch.notices)
    assert not multiprocessing.active_children()


def test_a_task_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    whole = executors.run_here

    def run_here(task, report, notice):
        if task.label == "evill" and task.chunk == 0:
            raise ArithmeticError("the sum came out wrong")
        return whole(task, report, notice)

    monkeypatch.setattr(executors, "run_here", run_here)
    out = tmp_path / "run"
    labels = ["evill", "random"]
    with pytest.raises(RunError, match="evill, part 0: ArithmeticError: the sum came out wrong"):
        simulate(labels, **SETTINGS, out=out)
    assert "Traceback" in (out / "unfinished" / "evill.0.error.txt").read_text()
    assert Record.open(out).labels == ["random"]
    monkeypatch.undo()
    assert simulate(labels, **SETTINGS, out=out).complete  # the part that was there is used


def test_a_worker_that_always_dies_is_given_up():
    watch = Murderer()
    failures = executors.Outcomes(watch, lambda task: None)
    task = runner.Task("nowhere", {}, "ofuglb", 0, 1.0)
    assert [failures.lost(task, "gone") for _ in range(4)] == [True, True, True, False]
    with pytest.raises(RunError, match="ofuglb, part 0: gone, 4 times"):
        failures.settle()
