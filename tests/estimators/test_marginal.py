"""With S, each coefficient has an interval of its own that does not pay for the others."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats

import torchglb as glb
from torchglb import ContrastSequence
from torchglb.errors import InputError

TRUTH = np.array([1.0, 0.5, -0.4, 0.3, 0.0, 0.2])
FORMULA = "y ~ a + b + c + d + e"


def table(n, seed, adaptive=False):
    """Gaussian responses of unit noise; with ``adaptive`` rows follow what was seen before."""
    rng = np.random.default_rng(seed)
    X, y, last = np.empty((n, 5)), np.empty(n), 0.0
    for t in range(n):
        X[t] = rng.uniform(-1.0, 1.0, 5)
        if adaptive:
            X[t, 0] = abs(X[t, 0]) * (1.0 if last > 1.0 else -1.0)
        y[t] = last = TRUTH[0] + X[t] @ TRUTH[1:] + rng.normal()
    return dict(zip("abcde", X.T, strict=True)) | {"y": y}


SCALER = glb.Scaler(ranges=dict.fromkeys("abcde", (-1, 1)) | {"y": (-4, 6)})


def fitted(data, **options):
    options = {"family": glb.Gaussian(1.0), "scaler": SCALER, "S": 8.0} | options
    return glb.glm(FORMULA, data, **options)


@pytest.fixture(scope="module")
def fit():
    return fitted(table(500, seed=1), contrasts=["a - b"])


def test_they_are_those_of_a_contrast_sequence(fit):
    core = fit.core
    X, r, _ = core.sequence.history.view()
    # of scaled rows z = (1, x)/length and responses (y - 1)/5
    C = np.vstack([np.eye(6), [0, 1, -1, 0, 0, 0]]) * 5.0 / core.length
    family, domain = glb.Gaussian(1.0 / 5.0), glb.Ball(6, 8.0 / 5.0)
    sequence = ContrastSequence(family, domain, torch.from_numpy(C), 0.05)
    sequence.update(X.contiguous(), r.contiguous())
    lower, upper = (end.numpy() for end in sequence.current())
    columns = fit.summary().columns
    shift = np.array([1.0, 0, 0, 0, 0, 0])
    assert np.allclose(columns["lower"], lower[:6] + shift, rtol=1e-8, atol=1e-10)
    assert np.allclose(columns["upper"], upper[:6] + shift, rtol=1e-8, atol=1e-10)
    declared = fit.contrast("a - b").columns
    assert declared["lower"][0] == pytest.approx(lower[6], rel=1e-8)


def test_they_are_shorter_than_those_of_the_joint_set(fit):
    one, all_at_once = fit.summary().columns, fit.summary(simultaneous=True).columns
    width = (one["upper"] - one["lower"]) / (all_at_once["upper"] - all_at_once["lower"])
    assert (width < 0.9).all()
    assert "each by itself" in fit.summary().facts["intervals"]
    assert "at once" in fit.summary(simultaneous=True).facts["intervals"]


def test_a_sum_that_was_not_declared_is_answered_by_the_joint_set(fit):
    found = fit.contrast("a - c").columns
    joint = fit.contrast("a - c", simultaneous=True).columns
    assert found["lower"][0] == joint["lower"][0]
    with pytest.raises(InputError, match="contrasts: expected a list"):
        fitted(table(50, seed=2), contrasts="a - b")


def test_e_values_agree_with_the_intervals(fit):
    row = fit.summary().row("a")
    width = row["upper"] - row["lower"]
    assert fit.test(f"a = {row['lower'] - 0.1 * width:.17g}").log_e > np.log(20.0)
    assert fit.test(f"a = {row['lower'] + 0.1 * width:.17g}").log_e < np.log(20.0)
    assert fit.test("a <= -1").p < 1e-6


def test_rows_in_parts_and_copies_give_the_same(fit):
    data = table(500, seed=1)
    parts = fitted({key: values[:400] for key, values in data.items()}, contrasts=["a - b"])
    parts.summary()  # a look in between changes nothing
    other = copy.deepcopy(parts)
    for each in (parts, other):
        each.update({key: values[400:] for key, values in data.items()})
    one, two = (each.summary().columns["lower"] for each in (parts, other))
    assert np.array_equal(one, two)
    assert np.allclose(one, fit.summary().columns["lower"], rtol=1e-6)


def test_coverage_of_marginal_intervals_with_adaptive_rows():
    runs, misses = 25, 0
    for seed in range(runs):
        model = fitted(table(300, seed=300 + seed, adaptive=True), delta=0.3)
        seen = model.core.marginal(np.eye(6)[1:2])
        misses += bool((seen.lower[0] > TRUTH[1]) | (seen.upper[0] < TRUTH[1]))
    assert stats.binomtest(misses, runs, 0.3, alternative="greater").pvalue > 0.01
