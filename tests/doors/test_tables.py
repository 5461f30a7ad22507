"""Tables, leaderboards, environments and runs x every kind of input: the same answer."""

import numpy as np
import pandas as pd
import pytest
import torch

import torchglb as glb
from torchglb import environments, preferences
from torchglb.estimators import GLMClassifier, GLMRegressor, Scaler
from torchglb.simulate import simulate

WHOLE = np.random.default_rng(0).integers(0, 2, (120, 2))
HEARD = (np.arange(120) % 3 == 0).astype(int)


def locked(values):
    values = np.array(values, dtype=float)
    values.setflags(write=False)
    return values


#: of whole numbers, which every dtype holds
KINDS = {
    "list": lambda v: v.tolist(),
    "float16": lambda v: v.astype(np.float16),
    "float32": lambda v: v.astype(np.float32),
    "int8": lambda v: v.astype(np.int8),
    "bool": lambda v: v.astype(bool),
    "locked": locked,
    "big-endian": lambda v: v.astype(">f8"),
}


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("model", [GLMClassifier, GLMRegressor])
def test_scikit_doors(kind, model):
    plain = model().fit(WHOLE.astype(float), HEARD)
    found = model().fit(KINDS[kind](WHOLE), HEARD)
    assert np.array_equal(found.coef_interval_, plain.coef_interval_)


#: a column of booleans is a factor, with a name of its own
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("big-endian", "bool")])
def test_formula_doors(kind):
    def intervals(convert, frame):
        x, y = convert(WHOLE[:, 0]), convert(HEARD)
        scaler = Scaler(ranges={"x": (0, 1)})
        fit = glb.glm("y ~ x", frame({"x": x, "y": y}), family="bernoulli", scaler=scaler)
        return fit.core.interval(np.eye(2)).lower[-1]

    for frame in (dict, pd.DataFrame):
        assert intervals(KINDS[kind], frame) == intervals(lambda v: v.astype(float), frame)


@pytest.mark.parametrize("kind", [*KINDS])
def test_winners_of_every_kind(kind):
    left, right = ["x"] * 120, ["y"] * 120
    plain = preferences.leaderboard(preferences.battles_of(left, right, HEARD.astype(float)))
    found = preferences.leaderboard(preferences.battles_of(left, right, KINDS[kind](HEARD)))
    assert np.array_equal(found.difference_lower, plain.difference_lower)


@pytest.mark.parametrize("S", [3, np.float32(3), np.int64(3), torch.tensor(3), [3, 3], (3.0, 3.0)])
def test_radii_of_environments(S):
    given = {"family": glb.Bernoulli(), "replicates": np.int64(2)}
    worlds = [environments.make("fixed", S=one, **given) for one in (S, 3.0)]
    assert torch.equal(worlds[0].theta_star, worlds[1].theta_star)


def test_runs_take_numbers_of_numpy():
    given = {"horizon": np.int64(5), "replicates": np.int32(2), "S": np.float32(3.0)}
    found = simulate(["random"], seed=np.int64(1), **given).arrays("random")["regret"]
    plain = simulate(["random"], horizon=5, replicates=2, S=[3.0], seed=1).arrays("random")
    assert np.array_equal(found, plain["regret"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GLMClassifier().fit([["a", "b"]] * 5, [0, 1, 0, 1, 0]), "."),
        (lambda: preferences.battles_of(["x"], ["y"], [2.0]), "winner"),
        (lambda: preferences.battles_of(["x"], ["y"], ["z"]), "winner"),
        (lambda: preferences.battles_of(["x", "y"], ["y"], [1.0]), "."),
        (lambda: environments.make("fixed", family=glb.Bernoulli(), S="wide"), "S"),
        (lambda: environments.make("fixed", family=glb.Bernoulli(), S=-1.0), "^S: expected pos"),
        (lambda: environments.make("fixed", family=glb.Bernoulli(), S=1.0, seed="a"), "^seed: "),
        (lambda: environments.make("fixed", family=glb.Bernoulli(), S=1.0, seed=2.5), "^seed: "),
        (lambda: environments.make("fixed", family=glb.Bernoulli(), S=1.0, device="x"), "^device"),
        (lambda: environments.uniform_log("fixed", 3), "^environment: expected .*, got str"),
        (lambda: environments.replay("ts", 3), "^policy: expected a Policy, got str"),
        (lambda: GLMClassifier(fit_intercept="no").fit(WHOLE, HEARD), "^fit_intercept: expected"),
        (lambda: GLMClassifier().fit(WHOLE, HEARD, -np.ones(120)), "column 'sample_weight'"),
        (lambda: glb.leaderboard(WHOLE), "^frame: expected a DataFrame"),
        (lambda: environments.make("fixed", family=glb.Bernoulli(), S=1.0, replicates=2.5), "repl"),
        (lambda: simulate(["random"], horizon=2.5, replicates=2, S=3.0), "horizon"),
        (lambda: simulate(["random"], horizon=5, replicates=2, S="wide"), "S"),
        (lambda: simulate(["random"], horizon=5, replicates=2, S=3.0, colour=1), "keys .*colour"),
    ],
)
def test_refusals_have_names(call, message):
    with pytest.raises(ValueError, match=message):
        call()
