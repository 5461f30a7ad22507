"""running=True: the intersection of sets at doubling times, and best bounds of fixed queries."""

import copy
import io

import pytest
import torch
from torch import Tensor

import torchglb as glb
from torchglb.errors import InputError
from torchglb.sets import RunningSet

FAMILY, BALL, DELTA = glb.Bernoulli(), glb.Ball(2, 3.0), 0.05
QUERIES = [[1.0, 0.0], [0.6, -0.8]]


def rows(n: int, *batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(*batch, n, 2, generator=generator, dtype=torch.float64)
    X = torch.nn.functional.normalize(X, dim=-1)
    return X, FAMILY.sample(1.5 * X[..., 0], generator)


def sequence(radius: str = "centred", **options) -> glb.ConfidenceSequence:
    return glb.ConfidenceSequence(FAMILY, BALL, DELTA, radius, running=True, **options)


def fed(made: glb.ConfidenceSequence, X: Tensor, r: Tensor) -> glb.ConfidenceSequence:
    for s in range(X.shape[-2]):
        made.update(X[..., s, :], r[..., s])
    return made


@pytest.mark.parametrize("radius", ["pac-bayes", "centred"])
def test_intersection_of_the_sets_at_doubling_times(radius):
    X, r = rows(21)
    made = fed(sequence(radius), X, r)
    found = made.current()
    assert isinstance(found, RunningSet)
    assert found is made.current()
    assert len(found.members) == 6  # at 1, 2, 4, 8, 16 and now
    assert found.delta == DELTA  # one event
    plain = []
    for n in (1, 2, 4, 8, 16, 21):
        other = glb.ConfidenceSequence(FAMILY, BALL, DELTA, radius)
        other.update(X[:n], r[:n])
        plain.append(other.current())
    arms = torch.tensor(QUERIES, dtype=torch.float64)
    least = torch.stack([one.upper_bound(arms) for one in plain]).amin(0)
    # the posterior that a sequence holds depends on when it was asked, up to its tolerance
    torch.testing.assert_close(found.upper_bound(arms), least, rtol=0, atol=0.05)
    assert bool((found.upper_bound(arms) <= found.latest.upper_bound(arms)).all())
    points = 3.0 * torch.rand(200, 2, generator=torch.Generator().manual_seed(1)).double() - 1.5
    inside = torch.stack([one.contains(points) for one in found.members]).all(0)
    assert bool((found.contains(points) == inside).all())
    assert float(found.test([1.0, 0.0], 0.0).log_e) == float(
        found.latest.test([1.0, 0.0], 0.0).log_e
    )


def test_best_bounds_of_queries_only_narrow():
    X, r = rows(40, 3)
    made = sequence(batch_shape=(3,), queries=QUERIES)
    queries = torch.tensor(QUERIES, dtype=torch.float64).expand(3, 2, 2)
    before = None
    for k in range(8):
        made.update(X[:, 5 * k : 5 * k + 5], r[:, 5 * k : 5 * k + 5])
        now = made.look()
        alone = made.current().latest.interval(queries)
        assert bool((now.upper <= alone.upper).all())
        assert bool((now.lower >= alone.lower).all())
        if before is not None:
            assert bool((now.upper <= before.upper).all() and (now.lower >= before.lower).all())
        before = now
    assert now.upper.shape == (3, 2)
    again = made.look()
    assert torch.equal(again.upper, now.upper)
    assert torch.equal(again.lower, now.lower)


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("options", [{}, {"ellipsoidal": True}, {"radius": "pac-bayes"}])
def test_state_and_copies_continue_bit_by_bit(aggregate, options):
    X, r = rows(30)
    X = X[torch.arange(30) % 7] if aggregate else X
    settings = {"aggregate": aggregate, "queries": QUERIES} | options
    made = fed(sequence(**settings), X[:20], r[:20])
    made.look()
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    loaded = sequence(**settings)
    loaded.load_state_dict(torch.load(file))
    twin = copy.deepcopy(made)
    found = []
    for one in (made, loaded, twin):
        fed(one, X[20:], r[20:])
        bounds = one.current().interval([0.0, 1.0])
        found.append(torch.stack([*one.look(), bounds.lower.expand(2), bounds.upper.expand(2)]))
        assert len(one.current().members) == 6
        assert one.current().delta == DELTA  # copies and loaded sets share one event too
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_states_of_others_are_refused_and_change_nothing():
    X, r = rows(6)
    made = fed(sequence(queries=QUERIES), X, r)
    state = made.state_dict()
    plain = glb.ConfidenceSequence(FAMILY, BALL, DELTA, "centred")
    with pytest.raises(InputError, match="without running=True"):
        plain.load_state_dict(state)
    other = fed(sequence(queries=[[0.0, 1.0]]), X[:3], r[:3])
    before = other.look()
    with pytest.raises(InputError, match="queries"):
        other.load_state_dict(state)
    broken = state | {"running": state["running"] | {"sets": state["running"]["sets"][:1]}}
    with pytest.raises(InputError, match="sets"):
        sequence(queries=QUERIES).load_state_dict(broken)
    assert len(other) == 3
    assert torch.equal(other.look().upper, before.upper)
    # a state that was saved without kept sets starts with none
    plain.update(X, r)
    fresh = sequence(queries=QUERIES)
    fresh.load_state_dict(plain.state_dict())
    assert len(fresh) == 6
    assert len(fresh.current().members) == 1


def test_a_refused_row_leaves_everything_as_it_was():
    X, r = rows(5)
    made = fed(sequence(queries=QUERIES), X, r)
    before = made.look()
    with pytest.raises(InputError):
        made.update([3.0, 0.0], 1.0)
    assert len(made) == 5
    assert torch.equal(made.look().upper, before.upper)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"running": False, "queries": QUERIES}, "queries: expected None without running=True"),
        ({"queries": [[1.0, 0.0, 0.0]]}, "queries: expected shape"),
        ({"queries": [[float("nan"), 0.0]]}, "queries: expected"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        glb.ConfidenceSequence(FAMILY, BALL, DELTA, **({"running": True} | options))


def test_look_needs_queries():
    with pytest.raises(InputError, match="queries: expected directions"):
        sequence().look()
    with pytest.raises(InputError, match="look: expected a sequence with running=True"):
        glb.ConfidenceSequence(FAMILY, BALL, DELTA).look()


@pytest.mark.parametrize("ask", ["look", "contrast"])
def test_best_bounds_that_were_handed_out_may_be_changed(ask):
    """Ends that a caller clamps in place are his own, not the best ones so far."""
    X, r = rows(20)
    made = fed(sequence("pac-bayes", queries=QUERIES, contrasts=QUERIES), X, r)
    twin = copy.deepcopy(made)
    getattr(twin, ask)()
    for end in getattr(made, ask)():
        end.clamp_(0.0, 0.1)
    for found, expected in zip(getattr(made, ask)(), getattr(twin, ask)(), strict=True):
        assert torch.equal(found, expected)
