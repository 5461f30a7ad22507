"""The incremental program where rounding, a neighbour or an interruption might decide."""

import contextlib
import copy
import math
import pickle

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb import AnchoredProgram
from torchglb.carried.carried_loss import CarriedLoss
from torchglb.optim import Status
from torchglb.ucb import native_support
from torchglb.ucb.incremental.rounds import CarriedRounds

FAMILIES = [glb.Bernoulli(), glb.Binomial(3), glb.Poisson(), glb.Gaussian(0.5)]
S = 3.0


def in_ball(generator, *shape):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    length = torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64)
    return S * torch.nn.functional.normalize(x, dim=-1) * length


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: type(f).__name__)
def test_values_are_closed_mostly_without_a_pass(family, generator):
    """To 1e-9 in every round, of arms that stay; the values are those of the native solver."""
    d, replicates, theta = 2, 4, torch.tensor([1.5, 0.5], dtype=torch.float64)
    program = AnchoredProgram(family, glb.Ball(d, S), (replicates,))
    X = in_ball(generator, replicates, 400, d) / S
    program.append(X, family.sample(X @ theta, generator))
    arms = in_ball(generator, replicates, 10, d) / S
    passes = []
    for t in range(80):
        stated = program.program(radius=5.0)
        choice = program.argmax(arms, level=stated.level, value_tol=1e-9)
        passes.append(choice.passes)
        index = choice.index[:, None]
        upper, lower = choice.upper.gather(-1, index)[:, 0], choice.lower.gather(-1, index)[:, 0]
        assert (upper - lower <= 1e-9 * (1.0 + upper.abs())).all()
        x = arms[torch.arange(replicates), choice.index]
        if t % 10 == 0:
            exact = native_support(stated, x[:, None], tol=1e-11, throw=False)
            assert (exact.lower[:, 0] <= upper + 1e-12).all()
            assert (exact.upper[:, 0] >= lower - 1e-12).all()
        program.append(x, family.sample(x @ theta, generator))
    # it took more than one of every problem in every round when each value needed its own
    assert torch.stack(passes)[20:].mean() < 0.25


def assert_same_state(one, other):
    """Bit by bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same_state(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


# ---- where rounding or a neighbour might decide --------------------------------------------------


@pytest.mark.parametrize("S", [10.0, 40.0])
def test_a_row_that_rounding_has_lost_still_counts(S):
    """One row is saturated at the only anchor and drowns in the curvature of the others."""
    for angle in (0.3, 0.67, 1.41, 2.15, 2.89):
        u = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        v = torch.stack([-u[1], u[0]])
        program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, S), anchors=1)
        program.append(u, 1.0)
        program.append(v.expand(400, 2), torch.arange(400, dtype=torch.float64) % 2)
        program.argmax(u[None], radius=3.0, value_tol=1e-6)
        stated = program.program(radius=3.0)
        choice = program.argmax(-u[None], level=stated.level, value_tol=1e-6)
        exact = native_support(stated, -u[None], tol=1e-9)
        assert choice.lower <= exact.upper + 1e-9
        assert choice.upper >= exact.lower - 1e-9


def test_carried_losses_in_single_precision_pay_for_their_rounding(generator):
    """Thousands of rows one by one, mostly the same: feasible points are so in double too."""
    generator.manual_seed(0)  # one with which 1e-4 was missing
    N, family, ball = 8, glb.Bernoulli(), glb.Ball(1, 2.0)
    program = AnchoredProgram(family, ball, (N,), dtype=torch.float32)
    arms = 0.999 * torch.randn(N, 5, 1, generator=generator).sign()
    theta = 1.2 * torch.randn(N, 1, generator=generator, dtype=torch.float64).sign()
    for t in range(1501):
        k = torch.randint(0, 5 if t % 7 == 0 else 1, (N,), generator=generator)
        x = arms[torch.arange(N), k]
        r = family.sample((x * theta).sum(-1), generator).float()
        if t and t % 50 == 0:
            stated = program.program(radius=3.0)
            choice = program.argmax(arms, level=stated.level, value_tol=1e-3)
        if t and t % 500 == 0:
            rows = program.history.rows()
            loss = glb.NegativeLogLikelihood(family, rows.X.double(), rows.r.double())
            double = glb.SublevelProgram(loss, ball, stated.level.double())
            exact = native_support(double, arms.double(), tol=1e-11, throw=False)
            assert (choice.lower.double() <= exact.upper + 1e-5).all(), t
            assert (choice.upper.double() >= exact.lower - 1e-5).all(), t
        program.append(x, r)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_many_equal_rows_at_once(dtype):
    """Their roundings agree in sign: bounds were too low when they were summed in one product."""
    for n in (500, 31_000, 45_000):
        program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 0.05), dtype=dtype)
        x = torch.tensor([1.0, 0.0], dtype=dtype)
        program.append(x.expand(n, 2), torch.ones(n, dtype=dtype))
        level = torch.tensor(n * math.log(2.0), dtype=dtype)
        # log(1 + e^-z) <= B/n is z >= c
        c = -math.log(math.expm1(float(level) / n))
        choice = program.argmax(-x[None], level=level, value_tol=1e-9)
        assert choice.upper >= -c
        assert choice.lower <= -c


def test_a_carried_minimum_in_single_precision_is_never_too_low(generator):
    """The level rests on it: it was 4e-4 too low after 1000 rows, one by one."""
    N, family, ball = 8, glb.Bernoulli(), glb.Ball(2, 4.0)
    theta = torch.tensor([1.5, 0.5], dtype=torch.float64)
    program = AnchoredProgram(family, ball, (N,), dtype=torch.float32)
    for t in range(1, 1001):
        x = 0.999 * torch.nn.functional.normalize(in_ball(generator, N, 2), dim=-1)
        program.append(x.float(), family.sample(x @ theta, generator).float())
        if t % 50 == 0:
            minimum, rows = program.minimum(), program.history.rows()
            loss = glb.NegativeLogLikelihood(family, rows.X.double(), rows.r.double())
            true = loss.value(minimum.theta.double())
            assert (minimum.loss.double() >= true).all(), t
            assert (minimum.loss.double() <= true + 0.1).all(), t


@pytest.mark.parametrize("d", [1, 2, 3])
def test_companions_change_nothing(d, generator):
    """Also where the level has no weight, at the pole of the ball: there it is all rounding."""
    together = AnchoredProgram(glb.Bernoulli(), glb.Ball(d, 4.0), (6,))
    alone = AnchoredProgram(glb.Bernoulli(), glb.Ball(d, 4.0), (1,))
    for _ in range(80):
        arms = torch.nn.functional.normalize(in_ball(generator, 6, 8, d), dim=-1)
        all_six = together.argmax(arms, radius=3.0, value_tol=1e-8)
        third = alone.argmax(arms[2:3], radius=3.0, value_tol=1e-8)
        assert (all_six.upper[2:3] == third.upper).all()  # bit by bit
        assert (all_six.lower[2:3] == third.lower).all()
        assert all_six.passes[2] == third.passes[0]
        assert all_six.index[2] == third.index[0]
        x = arms[torch.arange(6), all_six.index]
        r = torch.bernoulli(torch.full((6,), 0.6, dtype=torch.float64), generator=generator)
        together.append(x, r)
        alone.append(x[2:3], r[2:3])


def test_a_level_within_the_slack_of_the_minimum_promises_nothing(generator):
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), level_tol=1e-2)
    X = in_ball(generator, 200, 2) / S
    program.append(X, torch.bernoulli(torch.full((200,), 0.6).double(), generator=generator))
    arms = torch.eye(2, dtype=torch.float64)
    program.argmax(arms, radius=2.0)
    for _ in range(5):
        program.append(arms[0], 1.0)
        program.argmax(arms, radius=2.0)
    minimum = program.minimum()
    slack = minimum.loss - minimum.lower_bound
    assert slack > 1e-8
    choice = program.argmax(arms, level=minimum.loss - 1e-3 * slack, throw=False)
    assert choice.status == Status.INACCURATE
    assert (choice.lower == -torch.inf).all()
    assert torch.isfinite(choice.upper).all()
    assert program.argmax(arms, level=minimum.loss + 1e-3).status == Status.CONVERGED


@pytest.mark.parametrize("family", [glb.Bernoulli(), glb.Poisson()], ids=["bernoulli", "poisson"])
def test_ties_are_decided_by_looks(family, generator, monkeypatch):
    """Arms of nearly equal value take many looks, but never a solve of all arms."""
    N, d = 10, 2
    theta = 0.7 * S * torch.nn.functional.normalize(in_ball(generator, N, d), dim=-1)
    program = AnchoredProgram(family, glb.Ball(d, S), (N,))
    X = torch.nn.functional.normalize(in_ball(generator, N, 200, d), dim=-1)
    program.append(X, family.sample((X * theta[:, None]).sum(-1), generator))
    toward = torch.nn.functional.normalize(theta, dim=-1)[:, None]
    arms = torch.nn.functional.normalize(in_ball(generator, N, 4, d) + 2 * S * toward, dim=-1)
    stated = program.program(radius=5.0)
    value = native_support(stated, arms, tol=1e-9).upper
    tied = 0.9 * arms * (value.amin(-1, keepdim=True) / value)[..., None]
    monkeypatch.setattr(CarriedRounds, "_solve", None)
    choice = program.argmax(tied, level=stated.level)
    assert (choice.status == Status.CONVERGED).all()


def test_no_rows_and_no_room():
    """A ridge, no observation and the radius 0: the centre is all there is."""
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 2.0))
    program.append(torch.zeros(0, 2).double(), torch.zeros(0).double())
    assert len(program.history) == 0
    arms = torch.eye(2, dtype=torch.float64)
    choice = program.argmax(arms, radius=0.0, regularization=1.0)
    assert (choice.upper >= 0.0).all()
    assert (choice.lower <= 0.0).all()
    assert (choice.upper < 1e-3).all()
    with pytest.raises(glb.InputError, match="batch_shape: expected at least one problem, got"):
        AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 2.0), (0,))


def test_a_number_of_numpy_is_a_radius():
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 2.0), dtype=torch.float32)
    program.append([1.0, 0.0], 1.0)
    choice = program.argmax(torch.eye(2), radius=np.float64(1.0))
    assert choice.upper.dtype == torch.float32
    assert program.program(radius=np.float64(1.0)).level.dtype == torch.float32


def test_a_radius_broadcasts_over_the_batch():
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0), (2, 3))
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(2, 3, 2)
    program.append(x, torch.ones(2, 3).double())
    arms = torch.eye(2).double().expand(2, 3, 2, 2)
    radius = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    narrow = program.argmax(arms, radius)
    each = program.argmax(arms, radius.expand(2, 3))
    torch.testing.assert_close(narrow.upper, each.upper)
    assert (narrow.upper[0] < narrow.upper[1]).any()


@pytest.mark.parametrize(
    ("arms", "radius", "match"),
    [
        (torch.eye(2).cfloat(), 1.0, "arms: expected a dense tensor of real numbers"),
        (torch.eye(2).double(), torch.ones(3), "radius: expected shape"),
        (torch.eye(2).double(), "wide", "radius: expected a number or a tensor"),
    ],
)
def test_a_refused_question_changes_nothing(arms, radius, match):
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
    program.append([1.0, 0.0], 1.0)
    before = program.state_dict()
    with pytest.raises(glb.InputError, match=match):
        program.argmax(arms, radius)
    after = program.state_dict()
    assert_same_state(before, after)


def test_a_broken_state_is_refused_and_changes_nothing():
    saved = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
    saved.append([1.0, 0.0], 1.0)
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 3.0))
    for break_it in (
        lambda state: state["minimum"].pop("shift"),
        lambda state: state["minimum"].update(sums=torch.zeros(1, 3).double()),
        lambda state: state["anchors"].pop("sums"),
        lambda state: state["anchors"].update(sums=state["anchors"]["sums"].float()),
        lambda state: state.update(anchor_use=torch.zeros(3).double()),
        lambda state: state.update(round="first"),
    ):
        state = saved.state_dict()
        break_it(state)
        with pytest.raises(glb.InputError, match="state"):
            program.load_state_dict(state)
        assert len(program.history) == 0
    program.load_state_dict(saved.state_dict())
    assert len(program.history) == 1


@pytest.mark.parametrize("kind", [AnchoredProgram, glb.ucb.RefitProgram])
@pytest.mark.parametrize(
    ("family", "S", "match"),
    [
        (glb.Bernoulli(), 0.7, "'S'"),
        (glb.Poisson(), 3.0, "'family'"),
        (glb.Bernoulli(), 9.0, "'S'"),
    ],
)
def test_a_state_of_another_problem_is_refused(kind, family, S, match):
    """Anchors outside of the ball had "proven" lower bounds above S."""
    saved = kind(glb.Bernoulli(), glb.Ball(2, 3.0))
    saved.append([1.0, 0.0], 1.0)
    program = kind(family, glb.Ball(2, S))
    with pytest.raises(glb.InputError, match=match):
        program.load_state_dict(saved.state_dict())
    assert len(program.history) == 0


# ---- copies, interruptions, questions ------------------------------------------------------------


def played(generator, rounds=60, batch=(3,), **options):
    """A program that has played, with fresh arms, and the arms that come next."""
    d = 2
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(d, 4.0), batch, **options)
    for _ in range(rounds):
        play(program, in_ball(generator, *batch, 6, d) / S, generator)
    return program


def play(program, arms, generator):
    choice = program.argmax(arms, radius=4.0)
    x = arms.gather(-2, choice.index[..., None, None].expand(*choice.index.shape, 1, 2))[..., 0, :]
    r = torch.bernoulli(torch.sigmoid(2.0 * x.sum(-1)), generator=generator)
    program.append(x, r)
    return choice


def copies(program):
    loaded = AnchoredProgram(
        program.family,
        program.domain,
        tuple(program.batch_shape),
        aggregate=program.history.aggregate,
    )
    loaded.load_state_dict(program.state_dict())
    return [copy.deepcopy(program), pickle.loads(pickle.dumps(program)), loaded]


@pytest.mark.parametrize("aggregate", [False, True])
def test_copies_continue_bit_by_bit_and_are_right(aggregate, generator):
    """A copy that shared some of its sums gave wrong certificates from the next round on."""
    program = played(generator, aggregate=aggregate)
    others = copies(program)
    state = generator.get_state()
    for each in (program, *others):
        generator.set_state(state)
        each.said = [play(each, in_ball(generator, 3, 6, 2) / S, generator) for _ in range(25)]
        each.self_check()
    for other in others:
        for mine, its in zip(program.said, other.said, strict=True):
            assert torch.equal(mine.index, its.index)
            assert torch.equal(mine.upper, its.upper)
            assert torch.equal(mine.lower, its.lower)
        assert_same_state(program.state_dict(), other.state_dict())


class Interrupted(BaseException):
    """Like Ctrl-C: nobody catches it."""


@pytest.mark.parametrize("where", ["learn", "commit", "catch_up", "append", "play"])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_interruption_leaves_rows_and_sums_in_step(where, weighted, generator, monkeypatch):
    """Before or after each step of an append, and in a choice: the next answers are right."""
    program = played(generator, rounds=30)
    x, r = in_ball(generator, 3, 2) / S, torch.ones(3, dtype=torch.float64)
    weight = torch.full((3,), 0.5, dtype=torch.float64) if weighted else None
    arms = in_ball(generator, 3, 6, 2) / S
    targets = {"commit": glb.History, "append": glb.History, "catch_up": CarriedLoss}
    rounds = program._rounds
    owner = targets.get(where)
    calls = rounds._calls  # the compiled ones
    real = getattr(calls if owner is None else owner, where)
    for after in (False, True):

        def broken(*args, after=after, **kwargs):
            if after:
                real(*args, **kwargs)
            raise Interrupted

        rows = len(program.history)
        with monkeypatch.context() as patch:
            if where in targets:
                patch.setattr(owner, where, broken)
            else:
                patch.setattr(rounds, "_calls", calls._replace(**{where: broken}))
            try:
                program.append(x, r, weight)
                program.argmax(arms, radius=4.0)
            except Interrupted:
                pass
        assert len(program.history) in (rows, rows + 1)
        stated = program.program(radius=4.0)
        choice = program.argmax(arms, level=stated.level, value_tol=1e-8)
        exact = native_support(stated, arms, tol=1e-10, throw=False)
        assert (choice.upper >= exact.lower - 1e-9).all()
        assert (choice.lower <= exact.upper + 1e-9).all()
        for anchor in range(0, program._rounds.anchors.number, 5):
            program.self_check(anchor)


def test_a_gradient_transform_is_refused_or_harmless(generator):
    """``torch.func.grad`` through an append used to leave the row in the history only."""
    program = played(generator, rounds=10, batch=())
    arms = in_ball(generator, 6, 2) / S

    def through(x):
        program.append(x, 1.0)
        return program.argmax(arms, radius=4.0).upper.sum() + x.sum()

    with contextlib.suppress(RuntimeError, glb.InputError):
        torch.func.grad(through)(torch.tensor([0.3, 0.4], dtype=torch.float64))
    stated = program.program(radius=4.0)
    choice = program.argmax(arms, level=stated.level, value_tol=1e-8)
    exact = native_support(stated, arms, tol=1e-10, throw=False)
    assert (choice.upper >= exact.lower - 1e-9).all()
    assert (choice.lower <= exact.upper + 1e-9).all()


def test_questions_change_nothing(generator):
    program = played(generator)
    before = program.state_dict()
    program.minimum()
    program.minimum(0.5)
    program.program(radius=2.0)
    fork = program.fork()
    fork.argmax(-in_ball(generator, 3, 6, 2) / S, radius=4.0, value_tol=1e-9)
    fork.bound(in_ball(generator, 3, 6, 2) / S, radius=4.0, tol=1e-9)
    program.self_check()
    assert_same_state(before, program.state_dict())


def test_a_fork_follows_the_rows(generator):
    program = played(generator, rounds=20)
    fork = program.fork()
    for _ in range(20):
        play(program, in_ball(generator, 3, 6, 2) / S, generator)
    arms = in_ball(generator, 3, 6, 2) / S
    bound = fork.bound(arms, radius=4.0, tol=1e-8)
    assert (bound.status == Status.CONVERGED).all()
    assert (bound.upper - bound.lower <= 1e-8 * (1.0 + bound.upper.abs())).all()
    exact = native_support(fork.program(radius=4.0), arms, tol=1e-10)
    torch.testing.assert_close(bound.upper, exact.upper, rtol=0.0, atol=1e-5)
    fork.self_check()


def test_rows_that_are_not_what_lies_in_memory(generator):
    """A lazy negative has the other sign in memory, where compiled code would read it."""
    other_sign = torch.tensor([0.6j], dtype=torch.complex128).conj().imag
    assert other_sign.is_neg()
    assert other_sign.is_contiguous()
    program, plain = (AnchoredProgram(glb.Bernoulli(), glb.Ball(1, S)) for _ in range(2))
    program.append(other_sign, torch.tensor(1.0, dtype=torch.float64))
    plain.append([-0.6], 1.0)
    assert torch.equal(program.history.X, plain.history.X)
    arms = torch.stack([other_sign, other_sign.abs()])
    assert torch.equal(program.argmax(arms, radius=1.0).upper, plain.argmax(arms, radius=1.0).upper)
    with pytest.raises(glb.InputError, match="x: expected a dense tensor"):
        program.append(torch.tensor([0.6], dtype=torch.float64).to_sparse(), 1.0)
    assert len(program.history) == 1
    program.self_check()


def test_zeros_without_memory():
    """What autograd takes for a derivative that is zero has no address that could be read."""
    zero = torch._efficientzerotensor((2,), dtype=torch.float64)
    arms = torch._efficientzerotensor((3, 2), dtype=torch.float64)
    history, policy = (
        glb.History(2),
        glb.policies.make("ofuglb", family=glb.Bernoulli(), domain=glb.Ball(2, S)),
    )
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, S))
    for learn in (history.append, policy.update, program.append):
        learn(zero, zero[0])
    assert not program.argmax(arms, radius=1.0).upper.any()
    assert policy.select(arms) == 0
    assert not policy.bounds(zero).upper.any()
    assert not history.X.any()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_program_beside_follows_merged_rows_without_a_pass(weighted, generator, monkeypatch):
    """It used to make all its sums anew in every round, 64 passes per problem."""
    program = played(generator, rounds=20, aggregate=True)
    beside = program.beside(16)
    arms = in_ball(generator, 3, 6, 2) / S
    beside.bound(arms, radius=4.0, tol=1e-3)
    monkeypatch.setattr(CarriedLoss, "rebuild", None)
    for t in range(20):
        x, r = arms[:, t % 6], torch.tensor([0.0, 1.0, t % 2], dtype=torch.float64)
        program.append(x, r, torch.rand(3, generator=generator).double() if weighted else None)
        saved = beside.state_dict()
        stated = program.program(radius=4.0)
        bound = beside.bound(arms, level=stated.level, tol=1e-6)
        exact = native_support(stated, arms, tol=1e-10)
        assert (bound.upper >= exact.lower - 1e-9).all()
        assert (bound.upper - bound.lower <= 1e-6 * (1.0 + bound.upper.abs())).all()
    other = program.beside(16)
    other.load_state_dict(saved, history=False)
    assert torch.equal(other.bound(arms, level=stated.level, tol=1e-6).upper, bound.upper)
    beside.self_check()


def test_self_check_finds_a_wrong_sum(generator):
    program = played(generator, rounds=20, check_every=1)
    arms = in_ball(generator, 3, 6, 2) / S
    program.argmax(arms, radius=4.0)
    program._rounds.anchors.memory[1] += 1e-6
    with pytest.raises(glb.SolverError, match="carried sums of problem 1 at point"):
        program.argmax(arms, radius=4.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"radius": float("nan")},
        {"radius": -1.0},
        {"radius": 1.0, "tol": float("nan")},
        {"radius": 1.0, "value_tol": -1.0},
        {"radius": 1.0, "regularization": -0.1},
        {"radius": 1.0, "regularization": float("nan")},
        {"radius": 1.0, "max_steps": -1},
    ],
)
def test_bad_numbers_are_refused_by_name(bad, generator):
    program = played(generator, rounds=3)
    before = program.state_dict()
    name = next(key for key in bad if key != "radius" or len(bad) == 1)
    with pytest.raises(glb.InputError, match=name):
        program.argmax(in_ball(generator, 3, 6, 2) / S, **bad)
    assert_same_state(before, program.state_dict())
    with pytest.raises(glb.InputError, match="anchors"):
        AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 1.0), anchors=0)


def test_short_arms_are_bounded_too():
    """Squares of entries below 1e-162 underflow; their upper bounds were 0."""
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, 2.0))
    program.append([1.0, 0.0], 1.0)
    for size in (1e-150, 1e-170, 1e-300):
        arms = size * torch.eye(2, dtype=torch.float64)
        choice = program.argmax(arms, radius=1.0, value_tol=1e-6)
        assert (choice.upper >= 1.9 * size).all()
        assert (choice.upper <= 2.01 * size).all()


def test_a_choice_that_is_not_certain_is_not_played_unseen(generator, monkeypatch):
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(2, S))
    X = in_ball(generator, 50, 2) / S
    program.append(X, (X[:, 0] > 0).double())
    arms = in_ball(generator, 5, 2) / S
    assert program.decide(arms, 5.0, 1.0) == program.argmax(arms, 5.0).index
    play = CarriedRounds.play

    def uncertain(self, *given):
        played = play(self, *given)
        given[-1].status[:] = int(Status.INACCURATE)
        return played

    monkeypatch.setattr(CarriedRounds, "play", uncertain)
    assert program.decide(arms, 5.0, 1.0) is None
    with pytest.raises(glb.SolverError):
        program.argmax(arms, 5.0)


def test_self_check_where_a_derivative_has_no_bound():
    """A ratio of derivatives that overflows, times a curvature of 0, is no reason for alarm."""
    program = glb.AnchoredProgram(glb.QuasiBounded("cloglog"), glb.Ball(2, 600.0))
    program.self_check()
    program.append([1e-3, 0.0], 1.0)
    program.self_check()
