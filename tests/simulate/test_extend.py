"""A finished run gets more policies, replicates or rounds; what it has is kept."""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import torchglb as glb
from torchglb.simulate import Configuration, Record, Watch, runner, simulate
from torchglb.simulate import run as run_configuration

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import faults

BASE = dict(
    policies=["ofuglb-e", "random"], horizon=20, replicates=2, S=[3.0, 5.0], arms=5, chunk=3
)
GROWTH = {
    "policies": dict(policies=["ofuglb-e", "random", "gloc"]),
    "only the new policy": dict(policies=["gloc"]),
    "replicates": dict(replicates=5),
    "rounds": dict(horizon=33),
    "all": dict(policies=["gloc", "ofuglb-e"], replicates=3, horizon=31),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return simulate(**BASE, out=tmp_path_factory.mktemp("extend") / "run")


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished.directory, tmp_path / "run")
    return tmp_path / "run"


def again(record):
    """The configuration of a record, stages and all, from the beginning."""
    config = Configuration.load(record.config)
    return run_configuration(config, record.directory.with_name("again"))


class Seen(Watch):
    """Which tasks have run, and from which round."""

    def __init__(self):
        self.first, self.notices = {}, []

    def progress(self, task, rounds):
        self.first.setdefault((task.label, task.chunk), rounds)

    def notice(self, text):
        self.notices.append(text)


@pytest.mark.parametrize("growth", GROWTH)
def test_what_is_new_is_joined_and_what_was_there_is_kept(finished, run, growth):
    asked = BASE | GROWTH[growth]
    record = simulate(**asked, out=run)
    assert record.complete
    assert record.labels == list(dict.fromkeys(BASE["policies"] + asked["policies"]))
    old_rounds = finished.arrays("random")["rounds"]
    for label in record.labels:
        arrays = record.arrays(label)
        T, R = asked["horizon"], asked["replicates"]
        assert arrays["regret"].shape[:2] == (2, R)
        assert arrays["rounds"][-1] == T
        if label in finished.labels:
            old = finished.arrays(label)
            assert np.array_equal(arrays["rounds"][: len(old_rounds)], old_rounds)
            for name in ("regret", "certificate", "passes"):
                if name in old:
                    assert np.array_equal(arrays[name][:, :2, : len(old_rounds)], old[name]), name
    # what was asked for in two steps is what the same configuration gives in one
    afresh = again(record)
    for label in record.labels:
        one, other = record.arrays(label), afresh.arrays(label)
        assert one.keys() == other.keys()
        for name in one.keys() - {"seconds"}:
            assert np.array_equal(one[name], other[name]), (label, name)


def test_only_what_is_new_is_computed(run):
    watch = Seen()
    simulate(**BASE | {"replicates": 3}, out=run, watch=watch)
    assert watch.first == {("ofuglb-e", 2): 0, ("random", 2): 0}  # the chunk of two new elements
    watch = Seen()
    simulate(**BASE | {"replicates": 3, "horizon": 25}, out=run, watch=watch)
    assert set(watch.first.values()) == {20}  # from the last states
    watch = Seen()
    simulate(**BASE | {"replicates": 3, "horizon": 25, "policies": ["gloc"]}, out=run, watch=watch)
    assert {label for label, _ in watch.first} == {"gloc"}
    watch = Seen()
    simulate(
        **BASE | {"replicates": 3, "horizon": 25, "policies": ["random"]}, out=run, watch=watch
    )
    assert not watch.first  # nothing new is asked for


def test_without_its_last_states_a_run_is_played_again(run):
    for path in (run / "states").iterdir():
        faults.flip(path, random.Random(0))
    watch = Seen()
    found = simulate(**BASE | {"horizon": 25}, out=run, watch=watch)
    assert set(watch.first.values()) == {0}
    assert len(watch.notices) == 4
    assert found.complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(seed=1, replicates=3), "seed: 0 there, 1 now"),
        (dict(horizon=10), "horizon: 20 there, fewer now .10."),
        (dict(replicates=1), "replicates: 2 there, fewer now .1."),
        (dict(S=[3.0, 5.0, 7.0]), "S: .* there"),
        (dict(policies={"random": {"policy": "gloc"}}), "policy.random: .* there"),
        (dict(delta=0.1, horizon=30), "delta: 0.05 there, 0.1 now"),
    ],
)
def test_anything_else_is_refused(run, change, message):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(glb.InputError, match=message):
        simulate(**BASE | change, out=run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_policy_that_was_tuned_to_its_horizon_gets_no_more_rounds(tmp_path):
    asked = BASE | {"policies": ["rs-glincb"]}
    simulate(**asked, out=tmp_path)
    with pytest.raises(
        glb.InputError, match="horizon: 20 there, 21 now, but rs-glincb depends on it"
    ):
        simulate(**asked | {"horizon": 21}, out=tmp_path)
    assert simulate(**asked | {"replicates": 3}, out=tmp_path).complete


class Stopper(Watch):
    def __init__(self, after):
        self.left = after

    def progress(self, task, rounds):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    "growth", [*(pytest.param(g, marks=pytest.mark.slow) for g in ("replicates", "rounds")), "all"]
)
def test_an_extension_is_interrupted_and_continued(finished, run, growth, monkeypatch):
    monkeypatch.setattr(runner, "REPORT_EVERY", 0.0)
    asked, stops = BASE | GROWTH[growth], 0
    while stops < 60:
        try:
            record = simulate(**asked, out=run, watch=Stopper(after=9))
            break
        except KeyboardInterrupt:
            stops += 1
            assert not Record.open(run).complete
    assert stops >= 2
    direct = again(record)
    for label in record.labels:
        for name, value in direct.arrays(label).items():
            assert name == "seconds" or np.array_equal(record.arrays(label)[name], value), name


def test_an_unfinished_run_is_not_extended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "REPORT_EVERY", 0.0)
    with pytest.raises(KeyboardInterrupt):
        simulate(**BASE, out=tmp_path, watch=Stopper(after=5))
    with pytest.raises(glb.InputError, match="replicates: 2 there, 3 now"):
        simulate(**BASE | {"replicates": 3}, out=tmp_path)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[20, 2]], "stages: expected sizes that grow"),
        ([[30, 1]], "stages: expected sizes that grow"),
        ([[5, 1], [4, 1]], "stages: expected sizes that grow"),
        ([5], "stages: expected a list of .horizon, replicates."),
        ([[0, 1]], "stages: expected an integer of at least 1, got 0"),
    ],
)
def test_stages_grow(stages, message):
    with pytest.raises(glb.InputError, match=message):
        simulate(**BASE, stages=stages)
