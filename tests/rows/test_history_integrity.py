"""A history is changed as a whole or not at all, shares nothing, copies exactly and sums carefully."""

import copy
import math
import pickle
import sys
from fractions import Fraction

import pytest
import torch

import torchglb as glb
from torchglb.rounding import combine_rows, lost_in_sum, scatter_exactly, two_product, two_sum
from torchglb.rows.merging import MergedRows, merge, merge_at_once

DTYPES = [torch.float32, torch.float64]
DOUBLE = torch.float64


def rows_of(seed: int, count: int, batch=(2,), dtype=DOUBLE):
    generator = torch.Generator().manual_seed(seed)
    arms = torch.nn.functional.normalize(torch.randn(5, 3, generator=generator).double(), dim=-1)
    chosen = torch.randint(5, (*batch, count), generator=generator)
    r, w = (torch.rand(*batch, count, generator=generator).double() for _ in range(2))
    return (0.9 * arms[chosen]).to(dtype), r.to(dtype), w.to(dtype)


def equal_states(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a
    )


class Interruption(BaseException):
    """Comes at a bad time, as Ctrl-C does."""


def interrupted(call, at: int) -> bool:
    """Runs ``call`` and interrupts it before the given line of the library; False if it ended first."""
    left = at

    def trace(frame, event, arg):
        nonlocal left
        if "torchglb" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interruption:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [1, 70])
def test_an_interrupted_append_leaves_nothing_behind(aggregate, weighted, count):
    """Interrupted before every line that it runs: the history is as before, and goes on as before."""
    x, r, w = rows_of(1, count)
    more = rows_of(2, count)
    history = glb.History(3, (2,), aggregate, family=glb.Bernoulli())
    history.append(*rows_of(0, 40))
    untouched = copy.deepcopy(history)
    before, lines = history.state_dict(), 0
    while interrupted(lambda: history.append(x, r, w if weighted else None), lines):
        assert equal_states(before, history.state_dict()), f"line {lines}"
        lines += 1
    assert lines > 20
    untouched.append(x, r, w if weighted else None)
    for one in (history, untouched):
        one.append(*more)
    assert equal_states(history.state_dict(), untouched.state_dict())


@pytest.mark.parametrize("aggregate", [False, True])
def test_an_interrupted_load_leaves_nothing_behind(aggregate):
    history, other = (glb.History(3, (2,), aggregate) for _ in range(2))
    history.append(*rows_of(0, 40))
    other.append(*rows_of(1, 90))
    before, state, lines = history.state_dict(), other.state_dict(), 0
    while interrupted(lambda: history.load_state_dict(state), lines):
        assert equal_states(before, history.state_dict()), f"line {lines}"
        lines += 1
    assert equal_states(history.state_dict(), state)


# ---- nothing is shared --------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_was_given_and_what_was_read_is_not_the_history(aggregate, weighted):
    history = glb.History(3, (2,), aggregate)
    x, r, w = rows_of(0, 5)
    history.append(x, r, w if weighted else None)
    history.append(x[..., 0, :], r[..., 0])
    before = history.state_dict()
    for tensor in (x, r, w):
        tensor.fill_(0.25)
    for tensor in (*history.rows(), *history.whole(), history.X, history.r, history.w):
        if tensor is not None:
            tensor.fill_(0.125)
    assert equal_states(before, history.state_dict())


@pytest.mark.parametrize("aggregate", [False, True])
def test_reading_changes_nothing(aggregate):
    one, other = (glb.History(3, (2,), aggregate) for _ in range(2))
    for seed in range(30):
        for history in (one, other):
            history.append(*rows_of(seed, 3))
        _ = other.X, other.r, other.w, other.rows(), len(other), other.state_dict()
        assert equal_states(one.state_dict(), other.state_dict())


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))]
)
def test_copies_go_on_bit_by_bit_and_apart(duplicate, aggregate, dtype):
    family = glb.Bernoulli()
    history = glb.History(3, (2,), aggregate, family=family, dtype=dtype)
    history.append(*rows_of(0, 40, dtype=dtype))
    twin = duplicate(history)
    theta = torch.ones(2, 3, dtype=dtype) / 3
    for seed in range(1, 4):
        history.append(*rows_of(seed, 30, dtype=dtype))
    for seed in range(1, 4):
        twin.append(*rows_of(seed, 30, dtype=dtype))
    assert equal_states(history.state_dict(), twin.state_dict())
    ours, theirs = (glb.NegativeLogLikelihood.of(family, h).expand(theta) for h in (history, twin))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    before = twin.state_dict()
    history.append(*rows_of(9, 30, dtype=dtype))
    assert equal_states(before, twin.state_dict())


def test_a_deep_copy_keeps_graphs():
    history = glb.History(2)
    x = torch.tensor([0.6, 0.8], dtype=DOUBLE, requires_grad=True)
    history.append(2.0 * x / 2.0, 1.0)
    loss = glb.NegativeLogLikelihood.of(glb.Bernoulli(), copy.deepcopy(history))
    (gradient,) = torch.autograd.grad(loss(torch.ones(2, dtype=DOUBLE)), x)
    assert bool(gradient.abs().sum() > 0)


# ---- careful sums ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_once", [1, 999])
def test_merged_sums_do_not_drift(dtype, at_once):
    """Many times the same arm: weight and weighted reward are exact to one rounding."""
    eps, rounds = torch.finfo(dtype).eps, 3000 if at_once == 1 else 1000
    history = glb.History(1, aggregate=True, dtype=dtype, validate=False)
    weight, reward = (torch.tensor(v, dtype=dtype) for v in (0.3, 0.1))
    x = torch.ones(at_once, 1, dtype=dtype)
    for _ in range(rounds):
        history.append(x, reward.expand(at_once), weight.expand(at_once))
    count = rounds * at_once
    w = Fraction(float(weight)) * count
    r = Fraction(float(reward))
    assert abs(Fraction(float(history.w[0])) / w - 1) <= Fraction(eps) / 2
    assert abs(Fraction(float(history.r[0])) / r - 1) <= 2 * Fraction(eps)


def test_merged_rewards_of_both_signs_cancel_exactly():
    """Products are split exactly: large rewards that cancel leave the small ones."""
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(400, generator=generator).double()
    w = torch.rand(400, generator=generator).double()
    r, w = torch.cat([1e9 * r, -1e9 * r, r]), torch.cat([w, w, w])
    order = torch.randperm(1200, generator=generator)
    r, w = r[order], w[order]
    history = glb.History(1, aggregate=True, max_norm=None)
    history.append(torch.ones(1200, 1).double(), r, w)
    exact = sum(Fraction(a) * Fraction(b) for a, b in zip(r.tolist(), w.tolist(), strict=True))
    total = Fraction(float(history._held.y[0]))
    assert abs(total - exact) <= Fraction(2.0**-52) * abs(exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_over_merged_rows_hold(dtype):
    """A million times r = 0.1 on one arm: the bound over the merged row is above the truth."""
    family, domain = glb.Bernoulli(), glb.Ball(1, 3.0)
    history = glb.History(1, aggregate=True, dtype=dtype)
    r = torch.tensor(0.1, dtype=dtype)
    for _ in range(1000):
        history.append(torch.ones(1000, 1, dtype=dtype), r.expand(1000))
    fit = glb.constrained_mle(family, history, domain)
    level = fit.loss + torch.tensor(3.0, dtype=dtype)
    program = glb.SublevelProgram(glb.NegativeLogLikelihood.of(family, history), domain, level)
    upper = glb.support(program, torch.ones(1, 1, dtype=dtype), throw=False).upper.item()
    # the root of 1e6 (log(1 + e^z) - r z) = B above the minimum, by bisection in fifty digits
    import mpmath

    with mpmath.workdps(50):
        reward, B = mpmath.mpf(float(r)), mpmath.mpf(float(level))
        low, high = mpmath.log(reward / (1 - reward)), mpmath.mpf(0)
        for _ in range(160):
            z = (low + high) / 2
            above = 10**6 * (mpmath.log1p(mpmath.exp(z)) - reward * z) > B
            low, high = (low, z) if above else (z, high)
        assert upper >= low
        if dtype == DOUBLE:
            assert upper - low <= 1e-6


# ---- the tools ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_of_sums_and_products_are_exact(dtype):
    generator = torch.Generator().manual_seed(3)
    scale = torch.exp(3 * torch.randn(2000, generator=generator))
    a, b = ((torch.randn(2000, generator=generator) * scale).to(dtype) for _ in range(2))
    for found, exact in (
        (two_sum(a, b), lambda x, y: x + y),
        (two_product(a, b), lambda x, y: x * y),
    ):
        for x, y, total, rest in zip(*(t.tolist() for t in (a, b, *found)), strict=True):
            assert Fraction(total) + Fraction(rest) == exact(Fraction(x), Fraction(y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1000, 5000, 60_000])
@pytest.mark.parametrize("terms", ["equal", "random"])
def test_no_sum_loses_more_than_is_said(dtype, n, terms):
    """Equal terms are the worst case: their roundings agree. BLAS alone would lose thousands."""
    generator = torch.Generator().manual_seed(n)
    eps, allowed = torch.finfo(dtype).eps, lost_in_sum(n)
    for value in (0.1, 1 / 3):
        v = torch.full((2, n), value, dtype=dtype)
        if terms == "random":
            v = torch.rand(2, n, generator=generator).to(dtype)
        exact = Fraction(math.fsum(v[0].tolist()))
        rows = torch.ones(n, 3, dtype=dtype)
        for X in (rows, rows.mT.contiguous().mT):
            for found in (combine_rows(v, X)[0, 0], v.sum(-1)[0]):
                error = abs(Fraction(float(found)) - exact)
                assert error <= Fraction(eps * allowed) * exact


def test_scattered_sums_survive_infinity():
    total, rest = torch.zeros(2, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
    slot = torch.tensor([0, 1, 0])
    total, rest = scatter_exactly(
        total, rest, slot, torch.tensor([math.inf, 1.0, 2.0], dtype=DOUBLE)
    )
    assert total.tolist() == [math.inf, 1.0]
    assert rest.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_sums_do_not_depend_on_how_many_rows_come_at_a_time(dtype):
    """Bit by bit, and in the order in which the rows came."""
    generator = torch.Generator().manual_seed(5)
    arms = torch.rand(7, 2, generator=generator).to(dtype) / 2
    x = arms[torch.randint(7, (3, 600), generator=generator)]
    r, w = (torch.rand(3, 600, generator=generator).to(dtype) for _ in range(2))
    alone, together = (glb.History(2, (3,), aggregate=True, dtype=dtype) for _ in range(2))
    together.append(x, r, w)
    for start in range(0, 600, 7):
        part = slice(start, start + 7)
        alone.append(x[:, part], r[:, part], w[:, part])
    for one, two in zip(alone.rows(), together.rows(), strict=True):
        assert torch.equal(one[:, :7], two[:, :7])


def test_merging_by_row_and_at_once_give_the_same_sums():
    """The compiled way and that of devices, against sums of fractions."""
    generator = torch.Generator().manual_seed(6)
    x = torch.eye(3).double()[torch.randint(3, (200,), generator=generator)]
    r, w = torch.randn(2, 200, generator=generator).double()
    w = 1e6 * w.abs()
    zeros = torch.zeros(256, dtype=DOUBLE)
    empty = MergedRows(torch.zeros(256, 3).double(), *[zeros] * 4, torch.tensor(0), 0)
    found = merge(empty, x, r, w), merge_at_once(empty, x, r, w)
    for place in range(3):
        mine = (x == found[0].X[place]).all(-1)
        exact = sum(
            Fraction(a) * Fraction(b)
            for a, b in zip(r[mine].tolist(), w[mine].tolist(), strict=True)
        )
        for merged in found:
            assert torch.equal(merged.X[:3], found[0].X[:3])
            total = Fraction(float(merged.y[place])) + Fraction(float(merged.y_rest[place]))
            assert abs(total - exact) <= Fraction(2.0**-90) * sum(
                abs(Fraction(a) * Fraction(b))
                for a, b in zip(r[mine].tolist(), w[mine].tolist(), strict=True)
            )
