import copy
import math
import pickle

import numpy as np
import pytest
import torch

import torchglb as glb
import torchglb.rows.buffers

DTYPES = [torch.float32, torch.float64]
BATCHES = [(), (1,), (3,), (2, 3)]


def unit(*shape: int, generator, dtype=torch.float64) -> torch.Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)


def uniform(*shape: int, generator, dtype=torch.float64) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)


def state_of(history: glb.History) -> dict:
    """Everything observable, and the buffers behind it, but for the room that nobody has filled."""
    held = torchglb.rows.buffers.trimmed(history._held)
    hidden = {k: v for k, v in held._asdict().items() if v is not None}
    return {
        **history.state_dict(),
        **{k: v.clone() if torch.is_tensor(v) else v for k, v in hidden.items()},
    }


def assert_same_state(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        if torch.is_tensor(value):
            assert value.dtype == after[key].dtype
            assert torch.equal(value, after[key]), key
        else:
            assert value == after[key], key


# ---- plain rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_are_kept_in_order(batch, dtype, generator):
    history = glb.History(3, batch, dtype=dtype)
    assert history.X.shape == (*batch, 0, 3)
    x = 0.9 * unit(*batch, 12, 3, generator=generator, dtype=dtype)
    r, w = (uniform(*batch, 12, generator=generator, dtype=dtype) for _ in range(2))
    history.append(x[..., 0, :], r[..., 0], w[..., 0])  # one
    history.append(x[..., 1:9, :], r[..., 1:9], w[..., 1:9])  # many
    history.append(x[..., 9:9, :], r[..., 9:9], w[..., 9:9])  # none
    for k in range(9, 12):
        history.append(x[..., k, :], r[..., k], w[..., k])
    assert len(history) == 12
    for got, given in [(history.X, x), (history.r, r), (history.w, w)]:
        assert got.shape == given.shape
        assert got.dtype == dtype
        torch.testing.assert_close(got, given)
    assert torch.equal(history.X, x)


def test_weights_are_one_by_default(generator):
    history = glb.History(2, (3,))
    history.append(unit(3, 2, generator=generator), uniform(3, generator=generator))
    assert history.rows().w is None
    assert torch.equal(history.w, torch.ones(3, 1, dtype=torch.float64))
    history.append(unit(3, 2, generator=generator), uniform(3, generator=generator), 0.5)
    expected = torch.tensor([[1.0, 0.5]] * 3, dtype=torch.float64)
    assert torch.equal(history.w, expected)
    assert torch.equal(history.rows().w, expected)


def test_numbers_and_lists_are_converted():
    history = glb.History(2)
    history.append([0.6, 0.8], 1)
    history.append([[0.0, 1.0], [1.0, 0.0]], [0, 1], [2.0, 3.0])
    assert history.X.tolist() == [[0.6, 0.8], [0.0, 1.0], [1.0, 0.0]]
    assert history.r.tolist() == [1.0, 0.0, 1.0]
    assert history.w.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("aggregate", [False, True])
def test_one_weight_for_all_rows(batch, aggregate):
    history = glb.History(2, batch, aggregate)
    history.append(torch.eye(2).double().expand(*batch, 2, 2), torch.ones(*batch, 2).double(), 0.25)
    history.append(torch.ones(*batch, 2).double() / 2, torch.zeros(batch).double(), 0.5)
    assert history.w.tolist() == torch.tensor([0.25, 0.25, 0.5]).expand(*batch, 3).tolist()


def test_weight_zero_keeps_a_problem_out(generator):
    family = glb.Bernoulli()
    both, alone = glb.History(2, (2,)), glb.History(2)
    for k in range(6):
        x, r = unit(2, 2, generator=generator), torch.tensor([1.0, 0.0], dtype=torch.float64)
        seen = torch.tensor([1.0, float(k % 2)], dtype=torch.float64)
        both.append(x, r, seen)
        if k % 2:
            alone.append(x[1], r[1])
    theta = unit(2, 2, generator=generator)
    loss = glb.NegativeLogLikelihood.of(family, both)(theta)
    torch.testing.assert_close(loss[1], glb.NegativeLogLikelihood.of(family, alone)(theta[1]))


def test_growth_is_amortised(generator, monkeypatch):
    """Buffers double: n appends move O(n) rows, and reallocate O(log n) times."""
    monkeypatch.setattr("torchglb.rows.buffers.ROOM", 0)
    history = glb.History(2, (2,))
    moved, reallocations = 0, 0
    x, r = unit(2, 2, generator=generator), torch.ones(2, dtype=torch.float64)
    for k in range(3000):
        pointer = history._held.X.data_ptr()
        history.append(x, r)
        if history._held.X.data_ptr() != pointer:
            moved += k
            reallocations += 1
    assert reallocations <= 2 + math.log2(3000)
    assert moved <= 2 * 3000
    assert history._held.X.shape[-2] <= 2 * 3000


def test_snapshots_do_not_change(generator):
    for aggregate in (False, True):
        history = glb.History(2, aggregate=aggregate)
        x = unit(5, 2, generator=generator)
        r = uniform(5, generator=generator)
        history.append(x, r)
        rows = history.rows()
        copies = [t.clone() if t is not None else None for t in rows]
        for _ in range(100):  # over the edge of several buffers
            history.append(x, 1.0 - r, 2.0 * torch.ones_like(r))
        for row, kept in zip(rows, copies, strict=True):
            assert (row is None and kept is None) or torch.equal(row, kept)


def test_snapshots_survive_backward_after_appends(generator):
    """Autograd must not take a later append for a modification of what it saved."""
    history = glb.History(2)
    history.append(unit(4, 2, generator=generator), torch.ones(4, dtype=torch.float64))
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), history)(theta)
    history.append(unit(2, generator=generator), 1.0)
    loss.backward()
    assert torch.isfinite(theta.grad).all()


@pytest.mark.parametrize("which", ["x", "r", "weight"])
def test_rows_keep_their_graph(which, generator):
    history = glb.History(2)
    given = {
        "x": unit(3, 2, generator=generator),
        "r": uniform(3, generator=generator),
        "weight": uniform(3, generator=generator),
    }
    given[which].requires_grad_()
    history.append(unit(2, generator=generator), 1.0)
    history.append(**given)
    history.append(unit(2, generator=generator), 0.0)
    theta = torch.tensor([0.3, -0.2], dtype=torch.float64)
    loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), history)(theta)
    (gradient,) = torch.autograd.grad(loss, given[which])
    direct = glb.NegativeLogLikelihood(glb.Bernoulli(), *given.values())(theta)
    (expected,) = torch.autograd.grad(direct, given[which])
    torch.testing.assert_close(gradient, expected)


# ---- aggregation ----------------------------------------------------------------------------------


def expansions(family, histories, theta):
    return [glb.NegativeLogLikelihood.of(family, history).expand(theta) for history in histories]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("at_once", [1, 3, 40, 600])
def test_aggregated_is_the_plain_loss(batch, at_once, dtype, generator):
    """Every replicate draws its own arms, with duplicates also inside one append."""
    plain, merged = (glb.History(3, batch, aggregate=a, dtype=dtype) for a in (False, True))
    arms = 0.9 * unit(*batch, 7, 3, generator=generator, dtype=dtype)
    rounds = 4 if at_once > 100 else 12
    for _ in range(rounds):
        chosen = torch.randint(7, (*batch, at_once), generator=generator)
        x = arms.gather(-2, chosen[..., None].expand(*chosen.shape, 3))
        r, w = (uniform(*batch, at_once, generator=generator, dtype=dtype) for _ in range(2))
        for history in (plain, merged):
            if at_once == 1:
                history.append(x[..., 0, :], r[..., 0], w[..., 0])
            else:
                history.append(x, r, w)
    assert len(merged) == len(plain) == rounds * at_once
    assert merged.X.shape[-2] <= 7
    theta = unit(*batch, 3, generator=generator, dtype=dtype)
    tolerance = 200 * torch.finfo(dtype).eps
    for family in (glb.Bernoulli(), glb.Gaussian(0.5), glb.Poisson()):
        for a, b in zip(*expansions(family, (plain, merged), theta), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(plain.w.sum()))
    torch.testing.assert_close(merged.w.sum(-1), plain.w.sum(-1))


def test_merged_rows_are_the_distinct_ones_in_order_of_arrival():
    history = glb.History(2, aggregate=True)
    a, b, c = [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]
    history.append([a, b, a, a], [1.0, 0.0, 0.0, 1.0])
    history.append(c, 1.0, 2.0)
    history.append([b, c], [1.0, 0.0])
    assert history.X.tolist() == [a, b, c]
    assert history.w.tolist() == [3.0, 2.0, 3.0]
    torch.testing.assert_close(history.r, torch.tensor([2 / 3, 1 / 2, 2 / 3], dtype=torch.float64))
    assert len(history) == 7


def test_replicates_with_fewer_distinct_rows_are_padded_with_weight_zero():
    history = glb.History(1, (2,), aggregate=True)
    history.append([[1.0], [1.0]], [1.0, 1.0])
    history.append([[1.0], [0.5]], [0.0, 0.0])
    assert history.w.tolist() == [[2.0, 0.0], [1.0, 1.0]]
    assert history.r.tolist() == [[0.5, 0.0], [1.0, 0.0]]


def test_merged_memory_does_not_grow_with_time(generator):
    history = glb.History(2, (4,), aggregate=True)
    arms = unit(5, 2, generator=generator)
    for k in range(2000):
        history.append(
            arms[torch.tensor([k, k + 1, 2 * k, 3]) % 5], torch.ones(4, dtype=torch.float64)
        )
    assert history.X.shape == (4, 5, 2)
    assert history._held.X.shape[-2] <= 128
    assert history.rows().X.shape[-2] <= 128
    torch.testing.assert_close(history.w.sum(-1), torch.full((4,), 2000.0, dtype=torch.float64))


def test_merged_rows_carry_no_graph(generator):
    history = glb.History(2, aggregate=True)
    x = unit(2, generator=generator).requires_grad_()
    before = state_of(history)
    with pytest.raises(glb.InputError, match="x, r, weight: expected .*without derivatives, got"):
        history.append(x, 1.0)
    assert_same_state(before, state_of(history))


# ---- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_saved_and_loaded_goes_on_as_before(aggregate, batch, generator, tmp_path):
    def fresh():
        return glb.History(2, batch, aggregate=aggregate)

    original, arms = fresh(), unit(3, 2, generator=generator)

    def more(history, seed):
        local = torch.Generator().manual_seed(seed)
        chosen = torch.randint(3, (*batch, 10), generator=local)
        history.append(arms[chosen], uniform(*batch, 10, generator=local))

    more(original, 1)
    torch.save(original.state_dict(), tmp_path / "history.pt")
    copy = fresh()
    copy.load_state_dict(torch.load(tmp_path / "history.pt", weights_only=True))
    assert_same_state(original.state_dict(), copy.state_dict())
    for history in (original, copy):
        more(history, 2)
    assert len(copy) == 20
    for a, b in zip(original.rows(), copy.rows(), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_saved_state_is_a_copy(generator):
    history = glb.History(2)
    history.append(unit(2, generator=generator), 1.0)
    state = history.state_dict()
    state["X"].zero_()
    assert history.X.abs().sum() > 0
    state = history.state_dict()
    copy = glb.History(2)
    copy.load_state_dict(state)
    state["X"].zero_()
    assert copy.X.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("w"), "state: expected the entries .*, got"),
        (lambda s: s.update(aggregate=True), "state: expected aggregate=False, got aggregate=True"),
        (lambda s: s.update(X=s["X"][..., :1]), r"state\['X'\]: expected shape .*, got shape"),
        (lambda s: s.update(w=s["w"][:1]), r"state\['w'\]: expected shape .*, got shape"),
        (lambda s: s.update(y=s["y"][:1]), r"state\['y'\]: expected shape .*, got shape"),
        (lambda s: s.update(X=s["X"].float()), r"state\['X'\]: expected dtype .*, got"),
        (lambda s: s.update(w=s["w"].float()), r"state\['w'\]: expected dtype .*, got"),
        (lambda s: s.update(X=3), r"state\['X'\]: expected a tensor, got"),
        (lambda s: s.update(X=s["X"] * math.nan), r"state\['X'\]: expected finite values, got nan"),
        (lambda s: s.update(w=-s["w"]), r"state\['w'\]: expected non-negative weights, got -1"),
        (lambda s: s.update(distinct=s["distinct"].expand(2)), r"state\['distinct'\]: expected"),
        (lambda s: s.update(extra=1), "state: expected the entries .*, got .*extra"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message, generator):
    history = glb.History(2)
    history.append(unit(3, 2, generator=generator), torch.ones(3, dtype=torch.float64))
    state, before = history.state_dict(), state_of(history)
    change(state)
    with pytest.raises(glb.InputError, match=message):
        history.load_state_dict(state)
    assert_same_state(before, state_of(history))


# ---- refusals -------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
DOUBLE = torch.float64
BAD_ROWS = [
    ("x", dict(x=[NAN, 0.0], r=1.0)),
    ("x", dict(x=[INF, 0.0], r=1.0)),
    ("x", dict(x=[0.8, 0.8], r=1.0)),
    ("x", dict(x=[1.0 + 1e-12, 0.0], r=1.0)),
    ("x", dict(x=[1.0, 0.0, 0.0], r=1.0)),
    ("x", dict(x=1.0, r=1.0)),
    ("x", dict(x=[[[1.0, 0.0]]], r=[[1.0]])),
    ("x", dict(x=torch.zeros(2, dtype=torch.complex64), r=1.0)),
    ("x", dict(x="ab", r=1.0)),
    ("x", dict(x=None, r=1.0)),
    ("x", dict(x=torch.zeros(2, dtype=DOUBLE, device="meta"), r=1.0)),
    ("r", dict(x=[1.0, 0.0], r=NAN)),
    ("r", dict(x=[1.0, 0.0], r=-INF)),
    ("r", dict(x=[1.0, 0.0], r=2.0)),
    ("r", dict(x=[1.0, 0.0], r=-0.1)),
    ("r", dict(x=[1.0, 0.0], r=[1.0])),
    ("r", dict(x=[[1.0, 0.0]], r=1.0)),
    ("r", dict(x=[[1.0, 0.0], [0.0, 1.0]], r=[1.0])),
    ("r", dict(x=[1.0, 0.0], r="one")),
    ("r", dict(x=[1.0, 0.0], r=torch.tensor(1.0, dtype=DOUBLE, device="meta"))),
    ("r", dict(x=[1.0, 0.0], r=None)),
    ("weight", dict(x=[1.0, 0.0], r=1.0, weight=-1.0)),
    ("weight", dict(x=[1.0, 0.0], r=1.0, weight=NAN)),
    ("weight", dict(x=[1.0, 0.0], r=1.0, weight=INF)),
    ("weight", dict(x=[1.0, 0.0], r=1.0, weight=[1.0])),
    ("weight", dict(x=[[1.0, 0.0]], r=[1.0], weight=[1.0, 1.0])),
    ("weight", dict(x=[1.0, 0.0], r=1.0, weight=torch.tensor(1.0j))),
    ("weight", dict(x=[1.0, 0.0], r=1.0, weight="heavy")),
]


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize(("name", "arguments"), BAD_ROWS)
def test_bad_rows_are_named_and_change_nothing(name, arguments, aggregate, generator):
    history = glb.History(2, aggregate=aggregate, family=glb.Bernoulli())
    history.append(unit(3, 2, generator=generator), torch.ones(3, dtype=DOUBLE))
    before = state_of(history)
    with pytest.raises(glb.InputError, match=rf"^{name}: expected .+, got .+"):
        history.append(**arguments)
    assert_same_state(before, state_of(history))


@pytest.mark.parametrize("aggregate", [False, True])
def test_one_bad_row_among_many_changes_nothing(aggregate, generator):
    history = glb.History(2, (2,), aggregate=aggregate, family=glb.Bernoulli())
    x, r = unit(2, 700, 2, generator=generator), torch.ones(2, 700, dtype=DOUBLE)
    history.append(x, r)
    before = state_of(history)
    for place in [(0, 0), (1, 699)]:
        bad = r.clone()
        bad[place] = 1.5
        with pytest.raises(
            glb.InputError, match=rf"^r: expected .+, got 1.5 at index \({place[0]}, {place[1]}\)"
        ):
            history.append(x, bad)
        assert_same_state(before, state_of(history))


def test_long_rows_and_any_reward_if_allowed():
    history = glb.History(2, max_norm=None)
    history.append([30.0, 40.0], 1e6)
    assert history.X.tolist() == [[30.0, 40.0]]
    history = glb.History(2, max_norm=50.0)
    history.append([30.0, 40.0], 1.0)
    with pytest.raises(
        glb.InputError, match="x: expected rows of norm at most 50 .*Scaler.*, got 5[0-9.]+"
    ):
        history.append([31.0, 40.0], 1.0)


def test_unchecked_history_looks_at_no_values():
    history = glb.History(2, validate=False)
    history.append([NAN, 0.0], 1.0)
    assert torch.isnan(history.X).any()
    with pytest.raises(glb.InputError, match="x: expected shape"):  # shapes cost nothing
        history.append([1.0], 1.0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dim", dict(dim=0)),
        ("dim", dict(dim=2.0)),
        ("dim", dict(dim=True)),
        ("dtype", dict(dim=2, dtype=torch.float16)),
        ("dtype", dict(dim=2, dtype=torch.int64)),
        ("batch_shape", dict(dim=2, batch_shape=3)),
        ("batch_shape", dict(dim=2, batch_shape=(-1,))),
        ("max_norm", dict(dim=2, max_norm=-1.0)),
        ("family", dict(dim=2, family="bernoulli")),
    ],
)
def test_bad_settings_are_named(name, arguments):
    with pytest.raises(glb.InputError, match=rf"^{name}: expected .+, got .+"):
        glb.History(**arguments)


# ---- weighted rows in float32 -------------------------------------------------------------------


def test_weighted_rows_of_float32_keep_all_digits():
    """A product of two float32 has 48 digits: what compiled code reads is w r itself, not rounded."""
    generator = torch.Generator().manual_seed(5)
    history = glb.History(3, (2,), dtype=torch.float32)
    X, r = torch.rand(2, 90, 3, generator=generator) / 2, torch.rand(2, 90, generator=generator)
    w = 3 * torch.rand(2, 90, generator=generator)
    history.append(X[:, :10], r[:, :10])  # of weight 1, before anybody knows of weights
    w[:, :10] = 1.0
    assert history.arrays()[2].dtype == np.float32
    for t in range(10, 90):
        history.append(X[:, t], r[:, t], None if t % 7 == 0 else w[:, t])
        w[:, t] = 1.0 if t % 7 == 0 else w[:, t]
        if t % 5 == 0:  # read now and then, beyond the first buffer of 64 rows too
            _, weights, products, used = history.arrays()
            assert used == t + 1
            exact = w.double() * r.double()
            np.testing.assert_array_equal(products[:, :used], exact[:, :used])
            np.testing.assert_array_equal(weights[:, :used], w[:, :used])
    rows = history.rows()
    assert rows.r.dtype == torch.float32
    np.testing.assert_array_equal(rows.r, r)
    np.testing.assert_array_equal(history.arrays()[0][..., :90], X.mT)


def test_weighted_rows_of_float32_are_saved_copied_and_undone():
    history = glb.History(1, dtype=torch.float32)
    history.append([0.5], 0.1, 0.3)
    mark = history.mark()
    history.append([0.25], 0.7, 0.9)
    history.arrays()
    history.reset(mark)
    history.append([0.125], 0.2, 0.6)  # takes the place of the row that was forgotten
    exact = [
        np.float64(np.float32(a)) * np.float64(np.float32(b)) for a, b in ((0.1, 0.3), (0.2, 0.6))
    ]
    other = glb.History(1, dtype=torch.float32)
    other.load_state_dict(history.state_dict())
    for found in (history, copy.deepcopy(history), other):
        np.testing.assert_array_equal(found.arrays()[2][0, :2], exact)
        np.testing.assert_array_equal(found.r, np.float32([0.1, 0.2]))
    state = history.state_dict()
    state["y"] = state["y"].float()
    with pytest.raises(glb.InputError, match=r"state\['y'\]: expected dtype torch.float64"):
        other.load_state_dict(state)


def test_weighted_rows_of_float32_are_not_written_by_others():
    history = glb.History(1, dtype=torch.float32)
    history.append([0.5], 0.1, 0.3)
    assert history.keeps_graph
    with pytest.raises(glb.InputError, match="plain rows"):
        history.reserve(1)


# ---- plain rows, written by compiled code --------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_plain_rows_are_kept_as_others_are(batch, generator):
    plain, other = (
        glb.History(3, batch, family=glb.Bernoulli(), dtype=torch.float64) for _ in range(2)
    )
    x = torch.randn(*batch, 70, 3, generator=generator, dtype=torch.float64) / 8
    r = torch.rand(*batch, 70, generator=generator, dtype=torch.float64).round()
    assert plain.append_at_once(x[..., 0, :], r[..., 0], 1.0) == 1
    assert plain.append_at_once(x[..., 1:, :], r[..., 1:], 1.0) == 69
    other.append(x[..., 0, :].tolist(), r[..., 0].tolist())  # by way of Python
    other.append(x[..., 1:, :].tolist(), r[..., 1:].tolist())
    assert_same_state(other.state_dict(), plain.state_dict())


def test_what_is_not_plain_or_does_not_fit_is_left_to_others():
    x, r = torch.full((2,), 0.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    history = glb.History(2, family=glb.Bernoulli())
    long, high = 2.0 * x, 2.0 * r
    for given in (
        ([0.5, 0.5], r),
        (x, 1.0),
        (x.float(), r.float()),
        (x.clone().requires_grad_(), r),
        (x[:1], r),
        (x, r.expand(2)),
        (long, r),
        (x, high),
        (x, r * torch.nan),
        (x * torch.nan, r),
    ):
        assert history.append_at_once(*given, 1.0) == 0
        assert history.state_dict()["capacity"] == 0
    free = glb.History(2, max_norm=None)  # any length, but a number
    assert free.append_at_once(1e9 * x, high, math.inf) == 1
    assert free.append_at_once(x * torch.inf, r, math.inf) == 0
    assert free.append_at_once(x, r * torch.inf, math.inf) == 0
    assert glb.History(2, aggregate=True).append_at_once(x, r, 1.0) == 0
    assert len(free) == 1


# ---- room ------------------------------------------------------------------------------------------


def test_many_rows_get_much_room_and_copies_keep_its_size(monkeypatch, generator):
    monkeypatch.setattr("torchglb.rows.buffers.MANY", 100)
    monkeypatch.setattr("torchglb.rows.buffers.ROOM", 0)
    history = glb.History(3)
    x = unit(250, 3, generator=generator)
    for part in x.split(50):
        history.append(part, torch.ones(len(part)))
    capacity = history.state_dict()["capacity"]
    assert 1024 <= capacity < 1024 + 512
    small = len(pickle.dumps(glb.History(3)))
    assert len(pickle.dumps(history)) < small + 250 * 5 * 8 + 500  # without the room
    loaded = glb.History(3)
    loaded.load_state_dict(history.state_dict())
    for copied in (copy.deepcopy(history), pickle.loads(pickle.dumps(history)), loaded):
        assert copied.state_dict()["capacity"] == capacity
        assert torch.equal(copied.X, x)
        copied.append(x[0], 1.0)
        assert len(history) == 250


@pytest.mark.parametrize(("dtype", "aggregate"), [("64", False), ("64", True), ("32", False)])
def test_one_bandit_never_waits_for_buffers_to_grow(dtype, aggregate, generator):
    """A megabyte of room at once, unless it would be filled, or copied."""
    history = glb.History(2, aggregate=aggregate, dtype=getattr(torch, f"float{dtype}"))
    x, places = unit(3000, 2, generator=generator).to(history.dtype), set()
    for row in x:
        history.append(row, 1.0)
        places.add(history._held.X.data_ptr())
    room = history._held.X.numel()
    if dtype == "64" and not aggregate:
        assert len(places) == 1
        assert 1 << 17 <= room <= (1 << 17) + 2 * 1024
        assert len(pickle.dumps(history)) < 3000 * 4 * 8 + 2000
    else:
        assert len(places) > 4
        assert room <= 4 * x.numel()


def test_room_that_nobody_promises_is_doubled(monkeypatch, generator):
    monkeypatch.setattr("torchglb.rows.buffers.MANY", 64)
    monkeypatch.setattr("torchglb.rows.buffers.ROOM", 0)
    enlarged = torchglb.rows.buffers.enlarged

    def poor(held, capacity):
        if capacity > 200:
            raise RuntimeError("not enough memory")
        return enlarged(held, capacity)

    monkeypatch.setattr("torchglb.rows.buffers.enlarged", poor)
    history, x = glb.History(2), unit(90, 2, generator=generator)
    for row in x:
        history.append(row, 1.0)
    assert history.state_dict()["capacity"] == 128
    assert torch.equal(history.X, x)
