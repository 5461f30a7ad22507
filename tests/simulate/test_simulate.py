"""The runner and its record: what is recorded, and that nothing but the configuration matters."""

import gc
import json
import tempfile
from dataclasses import fields

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb import environments, policies, theory
from torchglb.simulate import Configuration, Record, run, runner, simulate
from torchglb.simulate.config import RunSettings, recorded_rounds
from torchglb.simulate.executors import Watch
from torchglb.simulate.observer import TIE, largest_bound
from torchglb.simulate.runner import Play

SMALL = dict(policies=["ofuglb", "evill", "random"], horizon=25, replicates=2, S=[3.0, 5.0], arms=6)


def table(**changes):
    return SMALL | changes


def config(**changes):
    return Configuration.load(table(**changes))


def results(record):
    """All arrays but the timing."""
    return {
        label: {k: v for k, v in record.arrays(label).items() if k != "seconds"}
        for label in record.labels
    }


def assert_identical(first, second):
    assert first.keys() == second.keys()
    for label, arrays in first.items():
        assert arrays.keys() == second[label].keys()
        for name, value in arrays.items():
            assert value.dtype == second[label][name].dtype, (label, name)
            np.testing.assert_array_equal(value, second[label][name], err_msg=f"{label} {name}")


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return simulate(**table(), out=tmp_path_factory.mktemp("runs") / "small")


def test_a_temporary_record_lives_as_long_as_its_object(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record = simulate(["random"], horizon=5, replicates=2, S=3.0)
    place = record.directory
    assert place.parent == tmp_path
    gc.collect()
    assert record.arrays("random")["regret"].shape == (1, 2, 5)
    del record
    gc.collect()
    assert not place.exists()


def test_a_run_that_fails_leaves_no_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(glb.InputError, match="executor"):
        simulate(["random"], horizon=5, replicates=2, S=3.0, executor="somebody")

    class Impatient(Watch):
        def progress(self, task, rounds):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(["random"], horizon=5, replicates=2, S=3.0, watch=Impatient())
    assert not list(tmp_path.iterdir())


def test_the_directory_may_be_a_text(tmp_path):
    record = run(config(policies=["random"]), str(tmp_path / "run"))
    assert record.complete
    assert record.directory == tmp_path / "run"


# ---- what is recorded ------------------------------------------------------------------------


def test_shapes_of_the_record(record):
    assert record.labels == SMALL["policies"]
    assert record.complete
    arrays = record.arrays("ofuglb")
    shapes = {name: value.shape for name, value in arrays.items()}
    assert shapes == {
        "rounds": (25,),
        "S": (2,),
        "kappa": (2,),
        "regret": (2, 2, 25),
        "certificate": (2, 2, 25),
        "passes": (2, 2, 25),
        "missed": (2, 2),
        "on_boundary": (2, 2),
        "theta_hat": (2, 2, 2),
        "theta_star": (2, 2, 2),
        "boundary": (2, 200, 2),
        "area": (2, 2),
        "seconds": (25,),
    }
    assert set(record.arrays("random")) == {
        *("rounds", "S", "kappa", "regret", "theta_star", "seconds")
    }


def test_numpy_alone_reads_it(record):
    with np.load(record.directory / "ofuglb.npz", allow_pickle=False) as file:
        assert file["regret"].shape == (2, 2, 25)
        assert "seconds" not in file.files
    saved = json.loads((record.directory / "config.json").read_text())
    assert Configuration.load(saved).as_dict() == saved
    manifest = json.loads((record.directory / "manifest.json").read_text())
    assert manifest["torch"] == torch.__version__
    assert manifest["generator"] == "philox4x32-10"
    assert {
        "torchglb",
        "numpy",
        "python",
        "seed",
        "device",
        "commit",
        "started",
        "finished",
    } <= set(manifest)
    assert sorted(p.name for p in record.directory.iterdir() if p.name[0] != ".") == [
        "config.json", "evill.npz", "manifest.json", "ofuglb.npz", "random.npz", "states", "timing",
    ]  # fmt: skip


def test_regret_and_estimate_are_those_of_a_plain_loop(record):
    """The record against a loop that knows nothing of the runner."""
    for s, S in enumerate(SMALL["S"]):
        family = glb.Bernoulli()
        world = environments.make("time-varying", family=family, S=S, replicates=2, arms=6)
        policy = policies.make(
            "ofuglb", family=family, domain=glb.Ball(2, S), batch_shape=(2,), horizon=25
        )
        theta = torch.full((2,), (S - 1) / np.sqrt(2)).double()
        regret = torch.zeros(2).double()
        curve = []
        for t in range(25):
            arms = world.arms(t)
            index = policy.select(arms)
            x = arms[torch.arange(2), index]
            policy.update(x, world.rewards(t, x, index))
            means = torch.sigmoid(arms @ theta)
            regret = regret + means.amax(-1) - torch.sigmoid(x @ theta)
            curve.append(regret)
        arrays = record.arrays("ofuglb")
        np.testing.assert_allclose(arrays["regret"][s], torch.stack(curve, -1), atol=1e-12)
        np.testing.assert_allclose(arrays["theta_hat"][s], policy.estimate(), atol=1e-5)
        assert arrays["kappa"][s] == theory.kappa(family, S)


def test_certificate_bounds_the_regret_and_is_nearly_exact():
    play = Play(config(policies=["ofuglb"], horizon=40), "ofuglb", 0)
    exact = torch.zeros(4).double()
    while not play.finished:
        arms = play.world.arms(play.t)
        index = play.policy.select(arms)
        x = arms[torch.arange(4), index]
        interval = play.policy.confidence_set().interval(x, scale="mean")
        cap = torch.sigmoid(play.world.S) - torch.sigmoid(-play.world.S)
        exact += torch.minimum(interval.width, cap)
        play.step()
        recorded = play.observer.certificate
        assert bool((recorded >= exact - 1e-6).all())
        assert bool((recorded <= 1.03 * exact).all())
        assert bool((play.observer.regret <= recorded).all())


def test_tolerance_of_ties_is_that_of_the_exact_policies():
    for dtype, tolerance in TIE.items():
        assert glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 1.0), dtype=dtype).tie_tol <= (
            tolerance
        )


def test_certificate_counts_ties_in_float32():
    """Of two arms within the tolerance the worse may be chosen; the certificate pays for it."""
    play = Play(config(policies=["ofuglb"], dtype="float32", horizon=5), "ofuglb", 0)
    chosen = torch.tensor([0.5, -0.25, 0.0, 3.0])
    best = largest_bound(play.policy, play.world.arms(0), chosen)
    expected = chosen.double() + 1e-4 * (1 + chosen.double().abs())
    np.testing.assert_allclose(best.numpy(), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["glm-ucb", "log-ucb-1", "glb-omd-rows", "ofuglb-e"])
def test_certificate_of_an_ellipsoid_is_about_the_best_arm(name):
    """Whatever was chosen: regret is measured against the arm of the largest bound."""
    play = Play(config(policies=[name], horizon=30), name, 0)
    for _ in range(10):
        play.step()
    arms, region = play.world.arms(play.t), play.policy.confidence_set()
    upper = region.upper_bound(arms)
    x = arms[torch.arange(4), upper.argmin(-1)]  # the worst of them
    before = play.observer.certificate.clone()
    play.observer.before_learning(play.t, arms, x)
    lower = -region.upper_bound(-x)
    cap = torch.sigmoid(play.world.S) - torch.sigmoid(-play.world.S)
    width = torch.sigmoid(upper.amax(-1)) - torch.sigmoid(lower)
    gained = play.observer.certificate - before
    np.testing.assert_allclose(gained, torch.minimum(width, cap), rtol=1e-9)


@pytest.mark.parametrize(("name", "dim"), [("ofuglb", 3), ("ofuglb", 2), ("glb-omd-rows", 3)])
def test_certificate_on_the_ball_is_about_its_best_arm(name, dim):
    """In three dimensions the arm that is played may be a local maximum only."""
    changed = table(policies=[name], environment="ball", dim=dim, horizon=9)
    del changed["arms"]
    play = Play(Configuration.load(changed), name, 0)
    for _ in range(6):
        play.step()
    region = play.policy.confidence_set()
    exact = isinstance(region, glb.LikelihoodRatioSet)
    x = play.policy.select_ball()
    best = largest_bound(play.policy, None, region.upper_bound(x))
    if exact:
        x = -x  # a bad choice
        best = largest_bound(play.policy, None, region.upper_bound(x))
        assert bool((best >= glb.argmax_ball(region.program, throw=False).lower).all())
    generator = torch.Generator().manual_seed(0)
    arms = torch.randn(4, 60, dim, generator=generator, dtype=torch.float64)
    arms = torch.nn.functional.normalize(arms, dim=-1)
    limit = torch.minimum(region.upper_bound(arms).amax(-1), play.world.S)
    assert bool((best >= limit - 1e-9).all())
    assert bool((best <= play.world.S).all())
    before = play.observer.certificate.clone()
    play.observer.before_learning(play.t, None, x)
    lower = play.policy.bounds(x).lower
    cap = torch.sigmoid(play.world.S) - torch.sigmoid(-play.world.S)
    least = torch.minimum(torch.sigmoid(best) - torch.sigmoid(lower), cap)
    assert bool((play.observer.certificate - before >= least - 0.02).all())


def test_nobody_plays_differently_because_someone_looks():
    """The observer's questions change neither choices nor passes nor the state."""
    for name in ("ofuglb", "ofuglb-e", "ts"):
        play = Play(config(policies=[name], horizon=30), name, 0)
        alone = Play(config(policies=[name], horizon=30), name, 0)
        for t in range(30):
            play.step()
            arms = alone.world.arms(t)
            index = alone.policy.select(arms)
            x = arms[torch.arange(4), index]
            alone.policy.update(x, alone.world.rewards(t, x, index))
            assert torch.equal(play.policy.passes, alone.policy.passes), (name, t)
        arms = play.world.arms(30)
        assert torch.equal(play.policy.scores(arms), alone.policy.scores(arms)), name


def test_the_time_of_a_policy_has_none_of_its_observer(monkeypatch):
    """A clock that advances by one second at every look: four looks, two of them at the policy."""
    ticks = iter(range(10_000))
    play = Play(config(policies=["ofuglb"], horizon=5), "ofuglb", 0)
    monkeypatch.setattr(runner.time, "perf_counter", lambda: float(next(ticks)))
    asked = []
    bounds = play.observer._tracker.bounds

    def slow(*args, **settings):
        asked.append(runner.time.perf_counter())
        return bounds(*args, **settings)

    monkeypatch.setattr(play.observer._tracker, "bounds", slow)
    while not play.finished:
        play.step()
    assert len(asked) == 5
    np.testing.assert_array_equal(play.result()["seconds"], 2.0)


def test_one_question_to_a_set_says_what_two_did():
    """Of a policy that knows no more than its set: ends of the chosen arm, bounds of all."""
    for name in ("ofuglb-e", "glb-omd"):
        play = Play(config(policies=[name], horizon=30), name, 0)
        for _ in range(10):
            play.step()
        arms = play.world.arms(10)
        x = arms[torch.arange(4), play.policy.select(arms)]
        low, high = play.observer._ends(10, arms, x)
        bounds = play.policy.bounds(x)
        torch.testing.assert_close(low, bounds.lower, rtol=1e-12, atol=1e-12)
        best = largest_bound(play.policy, arms, bounds.upper)
        torch.testing.assert_close(high, best, rtol=1e-12, atol=1e-12)


def test_boundary_and_area(record):
    arrays = record.arrays("ofuglb")
    centre = arrays["boundary"].mean(1)
    angle = np.unwrap(np.arctan2(*(arrays["boundary"] - centre[:, None]).transpose(2, 0, 1)[::-1]))
    assert (np.diff(angle) > 0).all()  # counter-clockwise around a point inside
    for s in range(2):
        x, y = arrays["boundary"][s].T
        area = 0.5 * abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))
        assert area == pytest.approx(
            arrays["area"][s, 0], rel=5e-3
        )  # polygons of 200 and 64 points
        assert np.linalg.norm(arrays["boundary"][s], axis=-1).max() <= SMALL["S"][s] + 1e-9


@pytest.mark.parametrize("horizon", [1, 7, 1000, 1001, 2500, 50_000])
def test_recorded_rounds(horizon):
    rounds = recorded_rounds(horizon)
    assert rounds[-1] == horizon
    assert rounds[0] >= 1
    assert len(rounds) == min(horizon, 1000)
    assert (np.diff(rounds) > 0).all()
    assert horizon > 1000 or (np.diff(rounds) == 1).all()


def test_thinned_curves_are_points_of_the_full_ones():
    full = simulate(**table(policies=["random"], horizon=1000)).arrays("random")
    thin = simulate(**table(policies=["random"], horizon=2000)).arrays("random")
    # the same first thousand rounds, of which every second is kept
    np.testing.assert_array_equal(thin["rounds"][:500], np.arange(2, 1001, 2))
    np.testing.assert_array_equal(thin["regret"][..., :500], full["regret"][..., 1::2])


def test_missed_counts_theta_outside_the_set():
    play = Play(config(policies=["ofuglb"]), "ofuglb", 0)
    play.step()
    assert not play.observer.missed.any()
    play.world.theta_star = play.world.S[:, None] * torch.tensor([3.0, 0.0]).double()
    play.step()
    assert play.observer.missed.all()


# ---- independence ----------------------------------------------------------------------------


def test_same_configuration_same_bytes(record, tmp_path):
    again = simulate(**table(), out=tmp_path / "again")
    for label in record.labels:
        mine, other = (r.directory / f"{label}.npz" for r in (record, again))
        assert mine.read_bytes() == other.read_bytes()


def test_chunks_and_companions_change_no_choice(record):
    """An element plays the same arms whatever is computed beside it."""
    whole = results(record)
    for chunk in (1, 3):
        parts = results(simulate(**table(chunk=chunk)))
        for label, arrays in parts.items():
            for name in arrays:
                np.testing.assert_allclose(arrays[name], whole[label][name], atol=1e-6, rtol=1e-6)
            np.testing.assert_allclose(arrays["regret"], whole[label]["regret"], atol=1e-12)
    alone = results(simulate(**table(S=[5.0], policies=["evill"])))
    np.testing.assert_allclose(alone["evill"]["regret"][0], whole["evill"]["regret"][1], atol=1e-12)


def test_policies_share_arms_and_luck():
    """Two labels of a deterministic policy run alike, beside whatever others."""
    same = {"a": {"policy": "ofuglb"}, "b": {"policy": "ofuglb"}, "random": {}}
    found = results(simulate(**table(policies=same)))
    assert_identical({"x": found["a"]}, {"x": found["b"]})


def test_seeds_differ(record):
    other = simulate(**table(seed=1, policies=["random"])).arrays("random")
    assert not np.array_equal(other["regret"], record.arrays("random")["regret"])


@pytest.mark.parametrize("environment", ["fixed", "ball"])
@pytest.mark.parametrize("family", ["bernoulli", {"name": "gaussian", "sigma": 0.5}, "poisson"])
def test_environments_and_families(environment, family):
    names = ["ofuglb", "evill", "greedy", "ts", "oracle", "random"]
    world = {"environment": environment} | ({"arms": 6} if environment == "fixed" else {})
    settings = dict(horizon=12, replicates=2, S=[2.0], family=family, theta="random", **world)
    found = results(simulate(names, **settings))
    for label, arrays in found.items():
        assert np.isfinite(arrays["regret"]).all()
        assert (np.diff(arrays["regret"], axis=-1) >= -1e-12).all(), label
    assert found["oracle"]["regret"].max() < 1e-9
    assert found["random"]["regret"][..., -1].min() > 0.1


# ---- the directory ---------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again(record):
    times = {path: path.stat().st_mtime_ns for path in record.directory.iterdir()}
    assert simulate(**table(), out=record.directory).labels == record.labels
    assert all(path.stat().st_mtime_ns == time for path, time in times.items() if path.suffix)


def test_another_configuration_is_refused(record):
    before = (record.directory / "config.json").read_bytes()
    with pytest.raises(glb.InputError) as refusal:
        simulate(**table(seed=3, delta=0.1), out=record.directory)
    text = str(refusal.value)
    assert "delta: 0.05 there, 0.1 now" in text
    assert "seed: 0 there, 3 now" in text
    assert "horizon" not in text
    assert (record.directory / "config.json").read_bytes() == before


def test_a_title_is_no_other_configuration(record):
    assert simulate(**table(title="another"), out=record.directory).complete


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(glb.InputError, match="expected a new or empty directory"):
        simulate(**table(), out=tmp_path)
    with pytest.raises(glb.InputError, match="got no config.json"):
        Record.open(tmp_path)


def test_an_unknown_label_is_refused(record):
    with pytest.raises(glb.InputError, match="label: expected one of ofuglb, evill, random"):
        record.arrays("emk")


# ---- configurations --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(horizon=0), "horizon: expected an integer of at least 1, got 0"),
        (dict(horizon="many"), "horizon: expected an integer of at least 1, got 'many'"),
        (dict(S=[]), "S: expected different positive numbers"),
        (dict(S=[4, -1]), "S: expected a positive finite number, got -1"),
        (dict(S=[4, 4]), "S: expected different positive numbers"),
        (dict(delta=1.5), r"delta: expected a number in \(0, 1\), got 1.5"),
        (dict(policies=["ucb"]), "policies: expected one of ada-ofu-ecolog, .* got ucb"),
        (dict(policies=[]), "policies: expected a list of different labels"),
        (dict(policies=["emk", "emk"]), "policies: expected a list of different labels"),
        (dict(policies=["../x"]), "policies: expected labels of letters"),
        (dict(policy={"emk": {}}), "policy: expected tables of labels in policies, got a table 'emk'"),
        (dict(policy={"ofuglb": {"colour": 1}}), "policy.ofuglb: expected one of .*radius.*, got 'colour'"),
        (dict(policy={"ofuglb": {"policy": "x"}}), "policy.ofuglb.policy: expected one of"),
        (dict(policy={"ofuglb": {"seed": 1}}), "policy.ofuglb: expected one of .*, got 'seed'"),
        (dict(family="cauchy"), "family: expected one of 'bernoulli', .* got 'cauchy'"),
        (dict(family={"name": "gaussian", "mean": 1}), "family gaussian: expected one of sigma, got 'mean'"),
        (dict(family="binomial"), "family binomial: expected its option trials"),
        (dict(environment="jungle"), "environment: expected one of .*'fixed'.* got 'jungle'"),
        (dict(environment=3), "environment: expected a name, got 3"),
        (dict(colour="red"), "configuration: expected one of the keys S, arms, .* got colour = 'red'"),
        (dict(device="tpu9"), "device: expected a device of this machine, got 'tpu9'"),
        (dict(dtype="int8"), "dtype: expected one of 'float64', 'float32', got 'int8'"),
        (dict(seed=-1), "seed: expected an integer of at least 0, got -1"),
        (dict(name="a b"), "name: expected a word"),
        (dict(title=3), "title: expected a text, got 3"),
    ],
)  # fmt: skip
def test_bad_configurations_are_refused_by_key(change, message):
    with pytest.raises(glb.InputError, match=message):
        config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(arms=0), "arms: expected an integer of at least 1, got 0"),
        (dict(theta="north"), "theta: expected one of 'paper', 'random', got 'north'"),
        (dict(family="poisson", policies=["ofulog+"]), "policy ofulog[+]: family: expected one that"),
        (dict(policies=["emk"], policy={"emk": {"regularizer": "x"}}), "policy emk: regularizer: expected one of 'vaw', 'ftrl', got 'x'"),
        (dict(environment="ball", policies=["rs-glincb"], arms=None), "policies: expected for environment ball one of .*emk, .* got rs-glincb"),
        (dict(executor="cloud"), "executor: expected one of .*'serial'.*, got 'cloud'"),
    ],
)  # fmt: skip
def test_bad_runs_are_refused_before_the_first_round(change, message, tmp_path):
    settings = {k: v for k, v in table(**change).items() if v is not None}
    with pytest.raises(glb.InputError, match=message):
        simulate(**settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_typed_settings_are_those_that_a_run_takes():
    """What an editor offers for ``simulate(...)`` is what the configuration knows, and all of it."""
    own = {field.name for field in fields(Configuration)} - {"options", "policy"}
    arguments = {"environment", "S", "horizon", "replicates"}
    options = {o for name in environments.available() for o in environments.options_of(name)}
    assert set(RunSettings.__annotations__) == own - arguments | options
