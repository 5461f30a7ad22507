"""Contrast sequences: what they promise, degenerate cases, saving. Bounds: test_bounds."""

import copy
import importlib
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb import ContrastSequence
from torchglb.errors import InputError
from torchglb.testing.policies import Interruption, assert_same, reload

DTYPE = torch.float64


def rows(family, d, n, S=2.0, batch=(), seed=0):
    """Rows on the sphere and rewards of a theta* of length 0.7 S."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn((*batch, n, d), generator=generator, dtype=DTYPE)
    X = 0.999 * X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    star = torch.randn((*batch, d), generator=generator, dtype=DTYPE)
    star = 0.7 * S * star / torch.linalg.vector_norm(star, dim=-1, keepdim=True)
    return X, family.sample((X @ star[..., None])[..., 0], generator), star


def fed(family, d, n, contrasts=None, seed=0, **options):
    X, r, star = rows(family, d, n, seed=seed)
    contrasts = torch.eye(d, dtype=DTYPE) if contrasts is None else contrasts
    sequence = ContrastSequence(family, glb.Ball(d, 2.0), contrasts, 0.05, **options)
    sequence.update(X, r)
    return sequence, star


def custom():
    """Logistic rewards, without compiled formulas."""
    return glb.CustomFamily(
        torch.nn.functional.softplus,
        reward_range=(0.0, 1.0),
        self_concordance=1.0,
        max_variance=0.25,
        min_variance=lambda S: float(
            torch.sigmoid(torch.tensor(S)) * torch.sigmoid(torch.tensor(-S))
        ),
    )


def weights_of(sequence):
    """The weights of the rows in each contrast, ``(N, n, m)``."""
    problems = sequence.declared.weighed(sequence.joint.current().likelihood)
    return torch.stack([torch.cat([block.b for block in rows.blocks()]) for rows in problems])


FAMILIES = [glb.Gaussian(0.5), glb.Bernoulli(), glb.Poisson(), glb.Binomial(3)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_narrower_than_the_joint_set_and_around_the_estimate(family):
    sequence, _ = fed(family, 3, 3000)
    lower, upper = sequence.current()
    joint = sequence.joint.current().interval(torch.eye(3, dtype=DTYPE))
    assert bool((lower >= joint.lower).all() and (upper <= joint.upper).all())
    assert bool((upper - lower < 0.85 * joint.width).all())
    estimate = sequence.estimate()
    assert bool((lower < estimate).all() and (estimate < upper).all())


@pytest.mark.parametrize("n", [0, 1, 2, 5, 20, 100])
def test_never_wider_than_the_joint_set(n):
    contrasts = [[1.0, 0.0, 0.0], [0.5, -3.0, 0.2]]
    for family in FAMILIES[:3]:
        sequence, _ = fed(family, 3, n, contrasts)
        lower, upper = sequence.current()
        joint = sequence.joint.current().interval(torch.tensor(contrasts, dtype=DTYPE))
        slip = 1e-9 * (1 + joint.width)
        assert bool((lower >= joint.lower - slip).all() and (upper <= joint.upper + slip).all())


def test_simultaneous_intervals_are_wider_than_marginal_ones():
    sequence, _ = fed(glb.Bernoulli(), 3, 3000)
    marginal, all_at_once = sequence.current(), sequence.current(simultaneous=True)
    assert bool((all_at_once.width > marginal.width).all())
    assert bool((all_at_once.width < 1.3 * marginal.width).all())


def test_scales_with_the_contrast():
    c = torch.tensor([[0.3, -0.4, 0.0]], dtype=DTYPE)
    one, _ = fed(glb.Gaussian(0.5), 3, 500, c)
    ten, _ = fed(glb.Gaussian(0.5), 3, 500, -10.0 * c)
    torch.testing.assert_close(ten.current().upper, -10.0 * one.current().lower)
    torch.testing.assert_close(ten.current().lower, -10.0 * one.current().upper)


def test_mean_scale_is_for_arms():
    sequence, _ = fed(glb.Bernoulli(), 3, 500)
    linear, mean = sequence.current(), sequence.current(scale="mean")
    torch.testing.assert_close(mean.upper, torch.sigmoid(linear.upper))
    torch.testing.assert_close(mean.lower, torch.sigmoid(linear.lower))
    with pytest.raises(InputError, match="scale: expected 'linear'"):
        fed(glb.Bernoulli(), 3, 5, [[1.0, -1.0, 0.0]])[0].current(scale="mean")


def test_names_and_kind_inputs():
    X, r, _ = rows(glb.Bernoulli(), 2, 50)
    one = ContrastSequence(glb.Bernoulli(), glb.Ball(2, 2.0), {"B-A": [-1, 1]}, 0.05)
    assert one.names == ("B-A",)
    one.update(X.float().numpy(), r.int().tolist())
    other = ContrastSequence(glb.Bernoulli(), glb.Ball(2, 2.0), np.array([[-1, 1]]), 0.05)
    other.update(X.float(), r.bool())
    assert torch.equal(one.current().lower, other.current().lower)


def test_weights_of_zero_are_rows_that_were_not_there():
    family = glb.Bernoulli()
    X, r, _ = rows(family, 2, 400)
    w = (torch.arange(400) % 2).to(DTYPE)
    some, half = (
        ContrastSequence(family, glb.Ball(2, 2.0), torch.eye(2), 0.05, radius="mean-loss")
        for _ in range(2)
    )
    some.update(X, r, w)
    half.update(X[1::2], r[1::2])
    torch.testing.assert_close(some.current().lower, half.current().lower, rtol=0, atol=1e-6)
    torch.testing.assert_close(some.current().upper, half.current().upper, rtol=0, atol=1e-6)


# ---- degenerate cases --------------------------------------------------------------------------


def test_no_rows_and_fewer_rows_than_features():
    sequence = ContrastSequence(glb.Bernoulli(), glb.Ball(4, 2.0), torch.eye(4), 0.05)
    lower, upper = sequence.current()
    torch.testing.assert_close(upper, torch.full((4,), 2.0, dtype=DTYPE), rtol=0, atol=1e-6)
    sequence.update([1.0, 0.0, 0.0, 0.0], 1.0)
    lower, upper = sequence.current()
    assert bool((upper <= 2.0 + 1e-6).all() and (lower >= -2.0 - 1e-6).all())


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda f: type(f).__name__)
def test_collinear_rows(family):
    x = torch.tensor([0.6, 0.8], dtype=DTYPE)
    generator = torch.Generator().manual_seed(1)
    r = family.sample(torch.full((600,), 0.5, dtype=DTYPE), generator)
    contrasts = torch.tensor([[0.6, 0.8], [0.8, -0.6]], dtype=DTYPE)
    sequence = ContrastSequence(family, glb.Ball(2, 2.0), contrasts, 0.05)
    sequence.update(x.expand(600, 2), r)
    lower, upper = sequence.current()
    assert lower[0] < 0.5 < upper[0]
    assert upper[0] - lower[0] < 0.8
    # nothing is known across: the joint interval, which the ball ends
    joint = sequence.joint.current().interval(contrasts)
    torch.testing.assert_close(upper[1], joint.upper[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(lower[1], joint.lower[1], rtol=0, atol=1e-6)


def test_rows_that_never_touch_the_contrast_give_the_joint_interval():
    """alpha = 0: the sums say nothing of c."""
    X = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=DTYPE).repeat(50, 1)
    sequence = ContrastSequence(glb.Gaussian(1.0), glb.Ball(2, 2.0), [[0.0, 1.0]], 0.05)
    sequence.update(X, torch.zeros(100, dtype=DTYPE))
    lower, upper = sequence.current()
    torch.testing.assert_close(upper, torch.full((1,), 2.0, dtype=DTYPE), rtol=0, atol=1e-5)
    torch.testing.assert_close(lower, torch.full((1,), -2.0, dtype=DTYPE), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contrasts": [[0.0, 0.0]]}, "contrasts: expected vectors of positive length"),
        ({"contrasts": [[1.0, 0.0, 0.0]]}, "contrasts: expected shape"),
        ({"contrasts": [[float("nan"), 0.0]]}, "contrasts: expected finite"),
        ({"contrasts": torch.zeros(0, 2)}, "contrasts: expected at least one"),
        ({"delta": 1.5}, "delta: expected"),
        ({"joint_share": 0.0}, "joint_share: expected"),
        ({"centred": "no"}, "centred: expected True or False"),
        ({"running": 2}, "running: expected True or False"),
        ({"contrasts": {"B-A": "x"}}, r"contrasts\['B-A'\]: expected"),
        ({"radius": "gaussian-prior"}, "radius: expected one that keeps to the ball"),
    ],
)
def test_refusals(change, message):
    settings = {"contrasts": [[1.0, 0.0]], "delta": 0.05} | change
    with pytest.raises(InputError, match=message):
        ContrastSequence(glb.Bernoulli(), glb.Ball(2, 2.0), **settings)


def test_a_word_is_no_flag():
    sequence, _ = fed(glb.Bernoulli(), 2, 30)
    with pytest.raises(InputError, match="simultaneous: expected True or False"):
        sequence.current("linear")


def test_refused_updates_change_nothing():
    sequence, _ = fed(glb.Bernoulli(), 2, 30)
    saved = sequence.state_dict()
    wrong = [
        ([3.0, 0.0], 1.0, None),
        ([1.0, 0.0], 2.0, None),
        ([1.0, 0.0], 1.0, 1.5),
        ([1.0, 0.0, 0.0], 1.0, None),
        ([[1.0, 0.0]], [1.0, 0.0], None),
        ([float("nan"), 0.0], 1.0, None),
    ]
    for x, r, w in wrong:
        with pytest.raises(InputError):
            sequence.update(x, r, w)
    assert_same(sequence.state_dict(), saved)
    with pytest.raises(InputError, match="value"):
        sequence.test([1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="relation"):
        sequence.test(0.0, "!=")


# ---- batches, saving ---------------------------------------------------------------------------


def test_batch_equals_loop():
    family, radii = glb.Bernoulli(), torch.tensor([1.0, 2.0], dtype=DTYPE)
    X, r, _ = rows(family, 2, 200, batch=(2,))
    c = torch.tensor([[[1.0, 0.0]], [[0.3, 0.7]]], dtype=DTYPE)
    together = ContrastSequence(family, glb.Ball(2, radii), c, 0.05, batch_shape=(2,))
    together.update(X, r)
    tested = together.test(0.1).log_e
    assert together.parts().slab.shape == (2, 1)
    for i in range(2):
        alone = ContrastSequence(family, glb.Ball(2, float(radii[i])), c[i], 0.05)
        alone.update(X[i], r[i])
        for a, b in zip(together.current(), alone.current(), strict=True):
            torch.testing.assert_close(a[i], b, rtol=0, atol=1e-9)
        torch.testing.assert_close(tested[i], alone.test(0.1).log_e, rtol=0, atol=1e-7)


@pytest.mark.parametrize("family", [glb.Poisson(), custom()], ids=lambda f: type(f).__name__)
def test_one_by_one_equals_all_at_once(family):
    X, r, _ = rows(glb.Bernoulli(), 2, 40)
    many, single = (
        ContrastSequence(family, glb.Ball(2, 2.0), torch.eye(2), 0.05) for _ in range(2)
    )
    many.update(X, r)
    for x, reward in zip(X, r, strict=True):
        single.update(x, reward)
        single.current()  # weights are carried from look to look
    assert torch.equal(weights_of(many), weights_of(single))
    assert torch.equal(many.current().lower, single.current().lower)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_many_rows_are_looked_at_in_parts(family, monkeypatch):
    whole = fed(family, 3, 400)[0]
    expected, weights = whole.current(), weights_of(whole)
    monkeypatch.setattr("torchglb.contrasts.weights.CHUNK", 150)
    monkeypatch.setattr("torchglb.rows.sums.MANY", 900)
    parts = fed(family, 3, 400)[0]
    found = parts.current()
    assert torch.equal(weights_of(parts), weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state"])
@pytest.mark.parametrize("family", [glb.Bernoulli(), custom()], ids=lambda f: type(f).__name__)
def test_copies_continue_bit_by_bit(how, family):
    if how == "pickle" and family.compiled() is None:
        pytest.skip("its functions are no names of a module")
    X, r, _ = rows(glb.Bernoulli(), 2, 90)
    sequence = ContrastSequence(family, glb.Ball(2, 2.0), torch.eye(2), 0.05, running=True)
    sequence.update(X[:60], r[:60])
    sequence.current()
    if how == "deepcopy":
        other = copy.deepcopy(sequence)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(sequence))
    else:
        other = ContrastSequence(family, glb.Ball(2, 2.0), torch.eye(2), 0.05, running=True)
        other.load_state_dict(reload(sequence.state_dict()))
    frozen = reload(other.state_dict())
    sequence.update(X[60:], r[60:])
    assert_same(reload(other.state_dict()), frozen)  # nothing is shared
    other.update(X[60:], r[60:])
    assert torch.equal(other.current().lower, sequence.current().lower)
    assert torch.equal(other.current(True).upper, sequence.current(True).upper)
    assert_same(reload(other.state_dict()), reload(sequence.state_dict()))


def test_refuses_a_state_of_other_contrasts():
    sequence, _ = fed(glb.Bernoulli(), 2, 10)
    other = ContrastSequence(glb.Bernoulli(), glb.Ball(2, 2.0), [[1.0, 1.0]], 0.05)
    with pytest.raises(InputError, match="contrasts"):
        other.load_state_dict(sequence.state_dict())
    with pytest.raises(InputError, match="state"):
        other.load_state_dict({})


def test_an_interrupted_update_is_all_or_nothing():
    X, r, _ = rows(glb.Bernoulli(), 2, 40)
    sequence = ContrastSequence(glb.Bernoulli(), glb.Ball(2, 2.0), torch.eye(2), 0.05)
    sequence.update(X[:30], r[:30])
    aware = copy.deepcopy(sequence)
    calls = Interruption.count(lambda: aware.update(X[30:], r[30:]))
    for call in sorted(random.Random(0).sample(range(1, calls), min(calls - 1, 15))):
        struck = copy.deepcopy(sequence)
        with pytest.raises(KeyboardInterrupt), Interruption(call):
            struck.update(X[30:], r[30:])
        expected = aware if len(struck) == 40 else sequence
        assert_same(struck.state_dict()["joint"], expected.state_dict()["joint"])
        assert len(struck) == len(expected)
        if len(struck) == 30:
            struck.update(X[30:], r[30:])
        assert torch.equal(struck.current().lower, copy.deepcopy(aware).current().lower)


def test_running_intervals_only_shrink():
    family = glb.Gaussian(1.0)
    X, r, _ = rows(family, 2, 400)
    running, plain = (
        ContrastSequence(family, glb.Ball(2, 2.0), torch.eye(2), 0.05, running=keep)
        for keep in (True, False)
    )
    low, high = torch.full((2,), -9.0, dtype=DTYPE), torch.full((2,), 9.0, dtype=DTYPE)
    for start in range(0, 400, 80):
        for sequence in (running, plain):
            sequence.update(X[start : start + 80], r[start : start + 80])
        lower, upper = running.current()
        now = plain.current()
        low, high = torch.maximum(low, now.lower), torch.minimum(high, now.upper)
        assert torch.equal(lower, low)
        assert torch.equal(upper, high)
        wide = running.current(simultaneous=True)
        assert bool((wide.lower <= lower).all() and (wide.upper >= upper).all())


# ---- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda f: type(f).__name__)
def test_tests_agree_with_intervals(family):
    """Outside of the interval by a little, the e-value is above 1/delta; at the middle below."""
    sequence, _ = fed(family, 3, 2000)
    lower, upper = sequence.current()
    out = sequence.test(upper + 0.1 * (upper - lower))
    assert bool((out.log_e > np.log(1 / 0.05)).all())
    assert bool((out.p < 0.05).all())
    inside = sequence.test(0.5 * (lower + upper))
    assert bool((inside.log_e < np.log(1 / 0.05)).all())
    one_sided = sequence.test(upper + 0.1 * (upper - lower), ">=")
    assert bool((one_sided.log_e > 2.0).all())
    assert bool((sequence.test(upper + 0.1, "<=").log_e < 0.0).all())
    where = out.theta
    value = (where * torch.eye(3, dtype=DTYPE)).sum(-1)
    torch.testing.assert_close(value, upper + 0.1 * (upper - lower))


def test_values_beyond_the_ball_are_impossible():
    sequence, _ = fed(glb.Bernoulli(), 2, 200)
    assert bool((sequence.test(5.0).p < 1e-2).all())


def test_undeclared_and_custom_families():
    """One without compiled formulas gives what the shipped one does, up to its general bounds."""
    X, r, _ = rows(glb.Bernoulli(), 2, 600)
    widths = []
    for family in (custom(), glb.Bernoulli()):
        sequence = ContrastSequence(family, glb.Ball(2, 2.0), [[1.0, 0.0]], 0.05, centred=False)
        sequence.update(X, r)
        lower, upper = sequence.current()
        assert bool((lower < sequence.estimate()).all() and (sequence.estimate() < upper).all())
        widths.append(float(upper - lower))
        widths.append(float(weights_of(sequence).sum()))
    assert widths[2] <= widths[0] + 1e-9  # general bounds are never sharper
    assert widths[1] == pytest.approx(widths[3], rel=1e-9)  # the same weights


def test_the_experiments_run_in_small(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "experiments")
    script = importlib.import_module("contrast_widths")
    assert script.main(["--quick", "--out", str(tmp_path)]) == 0
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"contrast_widths.png", "contrast_peeking.png"}
    assert importlib.import_module("contrast_speed").main(["--quick"]) == 0
    said = capsys.readouterr().out
    differ = re.search(r"they differ by (\S+)\)", said)
    assert differ is not None
    assert float(differ[1]) < 1e-10  # the kernel is what it says it is


def test_evidence_of_rows_along_the_axes():
    # an experiment with one row for each arm: a line of NaN once counted as evidence of 1/delta
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        sequence = glb.ContrastSequence(glb.Bernoulli(), glb.Ball(2, 3.0), torch.eye(2), 0.05)
        arm = torch.randint(0, 2, (350,), generator=generator)
        y = torch.bernoulli(torch.full((350,), 0.5), generator=generator)
        sequence.update(torch.eye(2).double()[arm] / 2**0.5, y.double())
        lower, upper = sequence.current()
        for value in (-0.1, 0.0, 0.1):
            inside = (lower < value) & (value < upper)
            assert bool((sequence.test(value).log_e[inside] < 2.9).all())
        assert bool((sequence.test(0.0).p > 0.05).all())
