"""ConfidenceSequence: rows in, sets out."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor

import torchglb as glb
from torchglb import radii
from torchglb.testing.policies import Interruption, assert_same

NAMES = tuple(radii.NAMED)
S = 3.0


def rows(n: int, *batch: int, dim: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn((*batch, n, dim), generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    return X, glb.Bernoulli().sample(1.5 * X[..., 0], generator)


def sequence(radius: str | radii.Radius = "pac-bayes", **options) -> glb.ConfidenceSequence:
    return glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S), 0.05, radius, **options)


def same(one: glb.ConfidenceSequence, two: glb.ConfidenceSequence, tol: float = 1e-9) -> None:
    first, second = one.evaluation(), two.evaluation()
    torch.testing.assert_close(first.level, second.level, rtol=0, atol=tol)
    torch.testing.assert_close(one.current().center, two.current().center, rtol=0, atol=1e-6)


# ---- what comes in -------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", NAMES)
def test_one_by_one_many_at_once_any_order(radius):
    X, r = rows(25)
    w = torch.linspace(0.2, 1.0, 25).double()
    at_once, one_by_one, late = (sequence(radius) for _ in range(3))
    at_once.update(X, r, w)
    for x, reward, weight in zip(X, r, w, strict=True):
        one_by_one.update(x, reward, weight)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(1))
    late.update(X[order[:10]], r[order[:10]], w[order[:10]])
    late.update(X[order[10:]], r[order[10:]], w[order[10:]])
    assert len(at_once) == len(one_by_one) == len(late) == 25
    same(at_once, one_by_one)
    same(at_once, late)


@pytest.mark.parametrize("radius", ["lipschitz", "mean-loss", "covering", "pac-bayes"])
def test_looking_in_between(radius):
    """Sums do not care; the centre of a posterior may lag behind by its tolerance."""
    X, r = rows(30)
    looked, blind = sequence(radius), sequence(radius)
    for k in range(0, 30, 5):
        looked.update(X[k : k + 5], r[k : k + 5])
        looked.current()
    blind.update(X, r)
    # the estimate is exact to 1e-9 (1 + |loss|) from any start
    tol = 2 * looked.radius.tolerance if radius == "pac-bayes" else 1e-7
    same(looked, blind, tol)


def test_batched_equals_loop():
    X, r = rows(20, 2, 3)
    together = sequence(batch_shape=(2, 3))
    together.update(X, r)
    level = together.evaluation().level
    for i in range(2):
        alone = sequence()
        alone.update(X[i, i], r[i, i])
        torch.testing.assert_close(level[i, i], alone.evaluation().level, rtol=0, atol=1e-7)


def test_merged_rows_give_the_same_set():
    X, r = rows(4)
    X, r = X.repeat(6, 1), torch.cat([r, 1 - r] * 3)
    merged, plain = sequence(aggregate=True), sequence()
    merged.update(X, r)
    plain.update(X, r)
    assert merged.history.X.shape[-2] == 4
    same(merged, plain, 1e-8)


def test_weight_zero_is_no_row():
    X, r = rows(10)
    weighted, plain = sequence(), sequence()
    weighted.update(X, r, torch.tensor([1.0] * 6 + [0.0] * 4).double())
    plain.update(X[:6], r[:6])
    same(weighted, plain)


def test_snapshots_do_not_change():
    X, r = rows(40)
    growing = sequence()
    growing.update(X[:10], r[:10])
    early = growing.current()
    before = (early.level.clone(), early.slack([0.5, 0.5]), early.interval([1.0, 0.0]).upper)
    growing.update(X[10:], r[10:], torch.full((30,), 0.5).double())
    after = (early.level, early.slack([0.5, 0.5]), early.interval([1.0, 0.0]).upper)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)
    assert float(growing.current().level) != float(early.level)
    assert growing.current() is growing.current()


@pytest.mark.parametrize("radius", ["mean-loss", "gaussian-prior"])
def test_float32_keeps_its_dtype(radius):
    X, r = rows(15, 3)
    small = sequence(radius, dtype=torch.float32, batch_shape=(3,))
    small.update(X.float(), r.float())
    current = small.current()
    assert current.level.dtype == current.center.dtype == torch.float32
    assert current.interval(X[:, 0].float(), scale="mean").upper.dtype == torch.float32
    assert bool(current.contains(current.center).all())
    large = sequence(radius, batch_shape=(3,))
    large.update(X, r)
    # float32 fits are exact to 1e-4 (1 + |loss|)
    expected = large.current().level
    torch.testing.assert_close(current.level.double(), expected, rtol=1e-4, atol=1e-4)


# ---- what is refused -----------------------------------------------------------------------------

GOOD = ([0.6, 0.8], 1.0, None)


@pytest.mark.parametrize(
    ("x", "r", "weight", "message"),
    [
        ([0.6, 0.8], 1.0, 1.5, r"weight: expected weights in \[0, 1\]"),
        ([0.6, 0.8], 1.0, -0.5, "weight: expected weights in"),
        ([0.6, 0.8], 1.0, math.nan, "weight: expected weights in"),
        ([0.6, math.nan], 1.0, None, "x: expected finite"),
        ([0.6, 0.8], math.nan, None, r"r: expected rewards of Bernoulli in \[0, 1\], got nan"),
        ([0.6, 0.8], 2.0, None, "rewards of Bernoulli"),
        ([0.8, 0.8], 1.0, None, "rows of norm at most 1"),
        ([0.6, 0.8, 0.0], 1.0, None, "x: expected shape"),
        ([[0.6, 0.8]], 1.0, None, "r: expected shape"),
        ([[0.6, 0.8]], [1.0], [0.5, 0.5], "weight: expected shape"),
        (torch.zeros(2).cfloat(), 1.0, None, "x: expected a dense tensor of real numbers"),
    ],
)
def test_refusals_leave_the_state_untouched(x, r, weight, message):
    made = sequence()
    made.update(*GOOD)
    level = made.evaluation().level  # a look may move the centre of the posterior
    before = made.state_dict()
    with pytest.raises(glb.InputError, match=message):
        made.update(x, r, weight)
    after = made.state_dict()
    assert len(made) == 1
    for part in ("history", "radius"):
        for name, old in before[part].items():
            assert (
                torch.equal(old, after[part][name])
                if isinstance(old, Tensor)
                else (old == after[part][name])
            ), name
    assert torch.equal(level, made.evaluation().level)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan, "0.05"])
def test_delta_outside_the_unit_interval(delta):
    with pytest.raises(glb.InputError, match="delta: expected a number in"):
        glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S), delta)


def test_mixture_needs_few_dimensions():
    with pytest.raises(glb.InputError, match="3"):
        glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(4, S), 0.05, "mixture")


class Rough(glb.CustomFamily):
    """Softplus again, but nothing is known of its third derivative."""

    def __init__(self) -> None:
        super().__init__(torch.nn.functional.softplus, reward_range=(0.0, 1.0))

    def self_concordance(self, radius: float) -> float:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore::torchglb.errors.UndeclaredConstantWarning")
def test_family_without_self_concordance():
    ball = glb.Ball(2, S)
    with pytest.raises(glb.InputError, match="self-concordant family"):
        glb.ConfidenceSequence(Rough(), ball, 0.05, "lipschitz", ellipsoidal=True)
    X, r = rows(10)
    for radius in ("lipschitz", "mean-loss", "covering"):  # these do not need it
        made = glb.ConfidenceSequence(Rough(), ball, 0.05, radius)
        made.update(X, r)
        assert bool(made.current().contains(made.current().center))


def test_family_without_self_concordance_and_posteriors():
    with pytest.raises(glb.InputError, match="self-concordant family"):
        glb.ConfidenceSequence(Rough(), glb.Ball(2, S), 0.05, "pac-bayes")


def test_radius_by_name_and_by_object():
    X, r = rows(20)
    named, given = sequence("lipschitz"), sequence(radii.Lipschitz(constant="table1"))
    data = sequence(radii.Lipschitz(constant="data"))
    for made in (named, given, data):
        made.update(X, r)
    same(named, given)
    assert float(data.evaluation().radius) < float(named.evaluation().radius)
    with pytest.raises(glb.InputError, match="radius: expected one of"):
        sequence("pac_bayes")
    with pytest.raises(glb.InputError, match="radius: expected a name"):
        sequence(3.0)


# ---- ellipsoids ----------------------------------------------------------------------------------


def test_ellipsoids():
    X, r = rows(50)
    plain = sequence()
    sharp = sequence(ellipsoidal=True)
    printed = sequence(ellipsoidal=True, ellipsoid="theorem")
    for made in (plain, sharp, printed):
        made.update(X, r)
    edge = plain.current().boundary(200)
    assert isinstance(sharp.current(), glb.EllipsoidSet)
    for made in (sharp, printed):
        assert bool((made.current().slack(edge) >= -1e-9).all())
    assert float(sharp.current().radius) < float(printed.current().radius)
    # Theorem 3.2: gamma = 2 (1 + S R) (4 S^2 lam + beta^2), lam = 1/(8 S^2 (1 + S R))
    R = math.tanh(S / 2)
    beta2 = float(printed.evaluation().radius)
    expected = 2 * (1 + S * R) * (4 * S * S / (8 * S * S * (1 + S * R)) + beta2)
    assert float(printed.current().radius) == pytest.approx(expected, abs=1e-6)


def test_ellipsoids_need_the_ball():
    with pytest.raises(glb.InputError, match="keeps to the ball"):
        sequence("gaussian-prior", ellipsoidal=True)
    with pytest.raises(glb.InputError, match="ellipsoid: expected one of"):
        sequence(ellipsoidal=True, ellipsoid="printed")


# ---- without the ball ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Gaussian(1.0), glb.Poisson()])
def test_gaussian_prior_follows_theta_out_of_the_ball(family):
    """|theta*| = 2 S: the centre is inside the set although it is outside the ball."""
    generator = torch.Generator().manual_seed(3)
    X, _ = rows(400, 3)
    theta = torch.tensor([2.0, 0.0]).double()
    made = glb.ConfidenceSequence(
        family, glb.Ball(2, 1.0), 0.05, "gaussian-prior", batch_shape=(3,)
    )
    made.update(X, family.sample(X @ theta, generator))
    current = made.current()
    assert bool(current.contains(current.center).all())
    assert bool((torch.linalg.vector_norm(current.center, dim=-1) > 1.2).all())
    assert bool(current.contains(theta.expand(3, 2)).all())
    interval = current.interval(torch.tensor([1.0, 0.0]).double().expand(3, 2))
    assert bool(((interval.lower > 1.0) & (interval.upper > 2.0)).all())


def test_gaussian_prior_without_data_knows_nothing():
    interval = sequence("gaussian-prior").current().interval([1.0, 0.0], scale="mean")
    assert (float(interval.lower), float(interval.upper)) == (0.0, 1.0)


# ---- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", ["pac-bayes", "lipschitz", "gaussian-prior"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_a_saved_sequence_continues_identically(radius, aggregate):
    X, r = rows(30, 2)
    made = sequence(radius, batch_shape=(2,), aggregate=aggregate)
    made.update(X[:, :20], r[:, :20], 0.7)
    made.current()
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    loaded = sequence(radius, batch_shape=(2,), aggregate=aggregate)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert len(loaded) == 20
    for one in (made, loaded):
        one.update(X[:, 20:], r[:, 20:])
    assert torch.equal(made.evaluation().level, loaded.evaluation().level)
    assert torch.equal(made.current().center, loaded.current().center)


def test_a_saved_state_is_a_copy():
    X, r = rows(10)
    made = sequence()
    made.update(X[:5], r[:5])
    state = made.state_dict()
    sums = state["radius"]["statistics"].clone()
    made.update(X[5:], r[5:])
    made.current()
    assert torch.equal(state["radius"]["statistics"], sums)
    after = made.state_dict()["radius"]["statistics"]
    assert float(radii.RowStatistics.of(after, 2).weight) == 10.0


def test_states_of_other_sequences_are_refused():
    made = sequence()
    made.update(*rows(5))
    state = made.state_dict()
    others = {
        "radius": sequence("lipschitz"),
        "delta": glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S), 0.1),
        "'S'": glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, S + 1), 0.05),
        "family": glb.ConfidenceSequence(glb.Poisson(), glb.Ball(2, S), 0.05),
        "shape": glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(3, S), 0.05),
    }
    for word, other in others.items():
        with pytest.raises(glb.InputError, match=word):
            other.load_state_dict(state)
        assert len(other) == 0
    with pytest.raises(glb.InputError, match="no \\['estimator'\\]"):
        made.load_state_dict({name: part for name, part in state.items() if name != "estimator"})
    assert len(made) == 5


# ---- balls of several sizes in one batch -----------------------------------------------------


@pytest.mark.parametrize("radius", ["pac-bayes", "gaussian-prior", "mixture", "mean-loss"])
@pytest.mark.parametrize("kind", [None, "fixed_point", "theorem"])
def test_mixed_radii_equal_the_loop(radius, kind):
    """Figure 1 runs S = 4, 6, 8, 10 as one batch: nothing may come from the largest of them."""
    if kind and not radii.by_name(radius).confined:
        return
    S = torch.tensor([4.0, 6.0, 8.0, 10.0]).double()
    X, r = rows(40, 4, seed=3)
    options = {"ellipsoidal": kind is not None, "ellipsoid": kind or "fixed_point"}
    x = torch.tensor([0.6, -0.7]).double()

    def intervals(S: Tensor | float, X: Tensor, r: Tensor, x: Tensor) -> Tensor:
        batch = tuple(X.shape[:-2])
        ball = glb.Ball(2, S)
        made = glb.ConfidenceSequence(
            glb.Bernoulli(), ball, 0.05, radius, batch_shape=batch, **options
        )
        found = []
        for end in (3, 11, 40):
            made.update(X[..., len(made) : end, :], r[..., len(made) : end])
            current = made.current()
            found += [*current.interval(x), current.radius, made.evaluation().level]
            if not kind and made.radius.confined:
                inner = current.ellipsoid(with_ball=True)
                found += [inner.radius, *inner.interval(x)]
        return torch.stack(found, dim=-1)

    together = intervals(S, X, r, x.expand(4, 2))
    for i in range(4):
        alone = intervals(float(S[i]), X[i], r[i], x)
        torch.testing.assert_close(together[i], alone, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("aggregate", [False, True])
def test_an_interrupted_update_leaves_no_row_that_the_radius_has_not_seen(monkeypatch, aggregate):
    sequence = glb.ConfidenceSequence(
        glb.Bernoulli(), glb.Ball(2, 3.0), delta=0.05, aggregate=aggregate
    )
    sequence.update([0.6, 0.8], 1.0, weight=0.5)
    before = sequence.state_dict()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(sequence.radius), "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.update([1.0, 0.0], 0.0, weight=0.5)
    assert len(sequence) == 1
    after = sequence.state_dict()
    assert all(torch.equal(after["radius"][name], t) for name, t in before["radius"].items())
    assert torch.equal(after["history"]["X"], before["history"]["X"])
    assert torch.equal(after["history"]["w"], before["history"]["w"])


@pytest.mark.parametrize("radius", ["pac-bayes", "lipschitz", "mean-loss", "centred"])
def test_a_look_at_any_time_shows_the_radius_the_same_rows(radius):
    X, r = torch.randn(30, 3, generator=torch.manual_seed(5)).double(), torch.ones(30).double()
    X, r[::3] = X / X.norm(dim=-1, keepdim=True), 0.0
    family, ball = glb.Bernoulli(), glb.Ball(3, 2.0)
    seldom, often, at_once = (glb.ConfidenceSequence(family, ball, 0.05, radius) for _ in range(3))
    at_once.update(X, r)
    for i, (x, reward) in enumerate(zip(X.numpy(), r.tolist(), strict=True)):
        seldom.update(x, reward)
        often.update(x, reward)
        if i % 7 == 0:
            often.state_dict()  # shows the radius the rows; a look also moves its posterior
    sums, *others = (each.state_dict()["radius"] for each in (seldom, often, at_once))
    assert all(torch.equal(other[name], sums[name]) for other in others for name in sums)
    level = seldom.evaluation().level
    assert all(torch.equal(other.evaluation().level, level) for other in (often, at_once))


def test_an_interrupted_look_shows_the_radius_no_row_twice(monkeypatch):
    X, r = torch.randn(50, 2, generator=torch.manual_seed(6)).double(), torch.ones(50).double()
    X, r[::2] = X / X.norm(dim=-1, keepdim=True), 0.0
    given = glb.Bernoulli(), glb.Ball(2, 3.0), 0.05
    sequence, other = glb.ConfidenceSequence(*given), glb.ConfidenceSequence(*given)
    monkeypatch.setattr("torchglb.inference.level.LATE", 8)
    sequence.update(X, r)
    other.update(X, r)
    update, left = type(sequence.radius).update, [3]

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(sequence.radius), "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.current()
    assert left == [0]
    sums, others = sequence.state_dict()["radius"], other.state_dict()["radius"]
    assert all(torch.equal(sums[name], others[name]) for name in sums)
    assert torch.equal(sequence.evaluation().level, other.evaluation().level)


@pytest.mark.parametrize("radius", NAMES)
@pytest.mark.parametrize("estimator", [glb.Refit(), glb.Incremental()], ids=str)
def test_an_evaluation_that_was_handed_out_may_be_changed(radius, estimator):
    X, r = rows(20)
    made = sequence(radius, estimator=estimator)
    made.update(X, r)
    twin = copy.deepcopy(made)
    found = made.evaluation()
    for given in (found.level, found.radius, *found.state.values()):
        given.fill_(0.5)
    twin.evaluation()
    for each in (made, twin):
        each.update(X, r)
    assert_same(made.state_dict(), twin.state_dict())
    assert torch.equal(made.evaluation().level, twin.evaluation().level)


@pytest.mark.parametrize("radius", ["pac-bayes", "lipschitz"])
@pytest.mark.parametrize("late", [1, 4])
def test_rows_that_came_by_another_way_are_carried_before_the_next_ones(radius, late):
    """Sums that had the last rows instead of those made the level too low."""
    X, r = rows(20)
    other, plain = (sequence(radius, estimator=glb.Incremental()) for _ in range(2))
    for each in (other, plain):
        each.update(X[:10], r[:10])
        each.current()
    other.history.append(X[10 : 10 + late], r[10 : 10 + late])
    plain.update(X[10 : 10 + late], r[10 : 10 + late])
    for each in (other, plain):
        each.update(X[10 + late :], r[10 + late :])
    same(other, plain)
    region = other.current()
    torch.testing.assert_close(
        other.fitted.estimate(region.likelihood).loss, region.level - region.radius
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"aggregate": True}, {"running": True, "contrasts": [[1.0, -1.0]]}],
    ids=["plain", "merged", "running"],
)
def test_an_interrupted_load_is_all_or_nothing(options):
    """Two sequences of equally many rows: the sums of one with the rows of the other look fine."""
    mine, other = sequence(**options), sequence(**options)
    mine.update(*rows(20, seed=1))
    other.update(*rows(20, seed=2))
    if options:
        other.current()
    if "contrasts" in options:
        mine.contrast()
        other.contrast()
    before, state, aware = mine.state_dict(), other.state_dict(), copy.deepcopy(mine)
    calls = Interruption.count(lambda: aware.load_state_dict(state))
    for call in range(1, calls):  # the last is that of the counter
        struck = copy.deepcopy(mine)
        with pytest.raises(KeyboardInterrupt), Interruption(call):
            struck.load_state_dict(state)
        assert_same(struck.state_dict(), before)
    assert_same(aware.state_dict(), state)
