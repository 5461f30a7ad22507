"""Things go wrong at random: results are identical, or an error names the file. Nothing is silent."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

import torchglb as glb
from torchglb.simulate import Record, simulate
from torchglb.simulate.files import UnsoundError, read_sealed, write_sealed
from torchglb.simulate.record import read_manifest, write_manifest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import faults

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = tmp_path_factory.mktemp("faults")
    return faults.go(place / "whole", faults.Log(place / "log")).directory


@pytest.fixture(scope="module")
def undisturbed(whole):
    return faults.results(whole)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Stopped in the middle: checkpoints, a finished part, finished results."""
    return faults.unfinished(tmp_path_factory.mktemp("half"))


#: how often a file is damaged: each time the run is continued, which takes a second
OFTEN = pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])


def assert_sound(outcome, *said):
    assert outcome.lost == faults.IDENTICAL, outcome
    for text in said:
        assert any(text in line for line in outcome.said), outcome


# ---- killing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_the_process_is_killed(times, undisturbed):
    outcome = faults.killed("parent", "serial", times, undisturbed, random.Random(1))
    assert outcome.times == times
    assert_sound(outcome)


# a command takes seconds until its workers can be forked
@pytest.mark.parametrize(
    ("victims", "workers"),
    [
        pytest.param("parent", 1, marks=pytest.mark.slow),
        ("worker", 2),
        pytest.param("both", 1, marks=pytest.mark.slow),
    ],
)
def test_processes_are_killed(victims, workers, undisturbed):
    outcome = faults.killed(victims, "processes", 1, undisturbed, random.Random(2), workers)
    assert outcome.times == 1
    assert_sound(outcome, *(["going on from its last checkpoint"] if victims == "worker" else []))


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["parent", "worker", "both"])
def test_processes_are_killed_twenty_times(victims, undisturbed):
    outcome = faults.killed(victims, "processes", 20, undisturbed, random.Random(3))
    assert outcome.times == 20
    assert_sound(outcome)


def test_idle_workers_are_killed(undisturbed):
    outcome = faults.killed_idle(undisturbed, workers=1)
    assert outcome.times == 2
    assert_sound(outcome, "an idle worker process ended with exit code -9; it is replaced")


# ---- no space --------------------------------------------------------------------------------


def test_the_disk_is_full(undisturbed):
    outcome = faults.no_space(undisturbed)
    assert_sound(outcome, "ofuglb", "no checkpoint")


def test_a_full_disk_stops_only_the_task_that_needs_the_space(tmp_path, monkeypatch):
    """The file that does not fit is named; the other tasks go on; later the run is completed."""
    write = faults.runner.write_sealed

    def no_space(path, data, identity):
        if path.name.startswith("ofuglb.1"):
            raise OSError(28, "No space left on device", str(path))
        write(path, data, identity)

    monkeypatch.setattr(faults.runner, "write_sealed", no_space)
    log = faults.Log(tmp_path / "log")
    with pytest.raises(
        glb.errors.RunError, match=r"1 task failed:\s+ofuglb, part 1: .*ofuglb\.1\.npz"
    ):
        faults.go(tmp_path / "run", log)
    assert Record.open(tmp_path / "run").labels == ["ofuglb-e", "random"]
    monkeypatch.undo()
    assert faults.go(tmp_path / "run", log).complete


# ---- damaged files ---------------------------------------------------------------------------


@OFTEN
def test_bits_of_an_unfinished_run_are_flipped(times, half, undisturbed):
    chance = random.Random(4)
    assert_sound(faults.damaged("", half, undisturbed, times, faults.flipped_anywhere, chance))
    outcome = faults.damaged("", half, undisturbed, times, faults.flipped_checkpoint, chance)
    assert_sound(outcome, "got a damaged file")


@OFTEN
def test_files_of_an_unfinished_run_are_cut_short(times, half, undisturbed):
    outcome = faults.damaged("", half, undisturbed, times, faults.cut, random.Random(5))
    assert_sound(outcome, "not continued from there")


def test_bits_of_a_finished_run_are_flipped(whole, undisturbed):
    chance = random.Random(6)
    outcome = faults.damaged("", whole, undisturbed, 12, faults.flipped_anywhere, chance)
    assert_sound(outcome, "put together again")


def test_a_checkpoint_of_another_seed_is_not_taken(half, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setitem(faults.SETTINGS, "seed", 8)
    other = faults.unfinished(tmp_path)
    monkeypatch.undo()
    outcome = faults.damaged("", half, undisturbed, 2, faults.foreign(other), random.Random(7))
    assert_sound(outcome, "expected a file of this configuration, got one of another")


def test_the_checkpoint_before_is_used_if_the_last_is_damaged(tmp_path):
    task = faults.runner.Task(str(tmp_path), {}, "x", 0, 1.0, "id")
    notices = []
    task.save(b"first")
    task.save(b"second")
    assert task.saved(notices.append) == b"second"
    faults.flip(task.checkpoint, random.Random(0))
    assert task.saved(notices.append) == b"first"
    assert str(task.checkpoint) in notices[0]


def test_every_bit_of_a_sealed_file_counts(tmp_path):
    path = tmp_path / "file"
    write_sealed(path, b"some data", "mine")
    data = path.read_bytes()
    assert read_sealed(path, "mine") == b"some data"
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(flipped))
        with pytest.raises(UnsoundError, match=str(path)):
            read_sealed(path, "mine")


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.mark.parametrize(
    "name", ["ofuglb.npz", "timing/ofuglb.npz", "config.json", "manifest.json"]
)
def test_reading_a_damaged_record_names_the_file(copy, name):
    chance = random.Random(8)
    data = (copy / name).read_bytes()
    for _ in range(20):
        faults.flip(copy / name, chance)
        with pytest.raises(glb.InputError, match=str(copy / name)):
            Record.open(copy).arrays("ofuglb")
        (copy / name).write_bytes(data)
    Record.open(copy).arrays("ofuglb")
    (copy / name).unlink()
    missing = {
        "config.json": "no config.json",
        "ofuglb.npz": "label: expected one of ofuglb-e, random",
    }
    with pytest.raises(glb.InputError, match=missing.get(name, name)):
        Record.open(copy).arrays("ofuglb")


def test_a_damaged_record_of_an_earlier_version_is_refused_too(copy):
    """It has no sums: the checks of ZIP, and whatever NumPy finds."""
    manifest = read_manifest(copy)
    del manifest["results"]
    write_manifest(copy, manifest)
    data = (copy / "ofuglb.npz").read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 1):
        (copy / "ofuglb.npz").write_bytes(data[:length])
        with pytest.raises(
            glb.InputError, match=r"ofuglb\.npz: expected arrays, got a damaged file"
        ):
            Record.open(copy).arrays("ofuglb")


def test_an_earlier_record_says_which_generator_made_it(copy):
    manifest = read_manifest(copy)
    del manifest["generator"]
    write_manifest(copy, manifest)
    assert Record.open(copy).manifest["generator"] == "splitmix64"
    # and gets no more rounds of another generator
    with pytest.raises(glb.InputError, match="generator: splitmix64 there, philox4x32-10 now"):
        simulate(**faults.SETTINGS | {"replicates": 3}, out=copy)


@pytest.mark.parametrize("label", ["../thesis", "/etc/passwd", "a/b", "", ".hidden", 3])
def test_labels_that_point_outside_are_refused(copy, label):
    manifest = read_manifest(copy)
    del manifest["config"]
    write_manifest(copy, manifest)
    path = copy / "config.json"
    table = faults.runner.Configuration.load(faults.SETTINGS).as_dict() | {"policies": [label]}
    path.write_text(json.dumps(table))
    with pytest.raises(glb.InputError, match=r"config\.json: expected labels that are names, got"):
        Record.open(copy)


@pytest.mark.slow
def test_the_whole_table():
    """``python experiments/faults.py``"""
    for outcome in faults.faults(20, 0):
        assert outcome.lost == faults.IDENTICAL, outcome
