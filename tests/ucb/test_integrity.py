"""Programs and policies after interruptions, copies and questions; and in any batch: the same bits."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys

import pytest
import torch
from torch import Tensor

import torchglb as glb
from torchglb.testing.policies import Interruption as Strike
from torchglb.ucb import native_support

DOUBLE = torch.float64
S = 3.0


def directions(generator: torch.Generator, *shape: int) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=DOUBLE)
    return 0.95 * torch.nn.functional.normalize(x, dim=-1)


def played(generator, rounds=25, batch=(2,), d=2, **options) -> glb.AnchoredProgram:
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, S), batch, **options)
    for _ in range(rounds):
        program.append(*row(program, generator))
        program.argmax(directions(generator, *batch, 6, d), radius=4.0)
    return program


def row(program, generator):
    batch, d = tuple(program.batch_shape), program.domain.dim
    r = (torch.rand(batch, generator=generator) < 0.6).double()
    return directions(generator, *batch, d), r


def check(program, arms) -> None:
    """Every carried sum against a pass, and every bound against a solve from scratch."""
    for anchor in range(program._rounds.anchors.number):
        program.self_check(anchor)
    stated = program.program(radius=3.0)
    choice = program.argmax(arms, level=stated.level)
    exact = native_support(stated, arms, tol=1e-12, throw=False)
    assert bool((choice.upper >= exact.lower).all())
    assert bool((choice.lower <= exact.upper).all())


class Interruption(BaseException):
    """Comes at a bad time, as Ctrl-C does."""


def interrupted(call, at: int) -> bool:
    """Interrupts a call before the given line of the library; False if it ended first."""
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
def test_after_any_interrupted_append_the_next_one_is_carried(aggregate, generator):
    """A row that reached the sums but not the history must not stand for the next one.

    The next row comes at once and by the other way in (with weights), so that nothing is compared
    in between; sums and history then have equally many rows.
    """
    program = played(generator, aggregate=aggregate, anchors=8)
    arms = directions(generator, 2, 6, 2)
    weight = torch.full((2,), 0.5, dtype=DOUBLE)
    line, ended = 0, False
    while not ended:
        struck = copy.deepcopy(program)
        first, second = row(program, generator), row(program, generator)
        ended = not interrupted(lambda: struck.append(*first), line)  # noqa: B023
        struck.append(*second, weight)
        check(struck, arms)
        line += 4 if aggregate else 1  # many lines, all of them before the history changes
    assert line > 10


@pytest.mark.parametrize("aggregate", [False, True])
def test_an_interrupted_append_leaves_no_row(aggregate, generator):
    """A policy counts rounds behind it: a row that stayed would be given, and counted, again."""
    program = played(generator, aggregate=aggregate, anchors=8)
    (x, r), weight = row(program, generator), torch.full((2,), 0.5, dtype=DOUBLE)
    line, struck = 0, copy.deepcopy(program)
    while interrupted(lambda: struck.append(x, r, weight), line):  # noqa: B023
        assert len(struck.history) == len(program.history)
        line, struck = line + 1, copy.deepcopy(program)
    assert line > 10


def test_after_any_interrupted_choice_the_next_one_is_right(generator):
    program = played(generator, anchors=8)
    line, ended = 0, False
    while not ended:
        struck = copy.deepcopy(program)
        arms = directions(generator, 2, 6, 2)
        ended = not interrupted(lambda: struck.argmax(arms, radius=2.0), line)  # noqa: B023
        struck.append(*row(program, generator))
        check(struck, arms)
        line += 1
    assert line > 10


def test_after_any_interrupted_load_sums_and_rows_agree(generator):
    """Two histories of equal length: a count of rows alone would not see the difference."""
    program, other = (played(generator, anchors=8) for _ in range(2))
    arms, state = directions(generator, 2, 6, 2), other.state_dict()
    line, ended = 0, False
    while not ended:
        struck = copy.deepcopy(program)
        ended = not interrupted(lambda: struck.load_state_dict(state), line)  # noqa: B023
        check(struck, arms)
        line += 1
    assert line > 10


@pytest.mark.parametrize("max_steps", [0, 1])
def test_a_round_that_is_given_up_knows_its_level(max_steps, generator):
    """Then all arms are solved from scratch: at a level that is at most ``level_tol`` too high."""
    for d in (2, 5):
        program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(d, 4.3))
        for _ in range(25):
            arms = directions(generator, 8, d)
            choice = program.argmax(arms, radius=0.5, max_steps=max_steps, throw=False)
            stated = program.program(radius=0.5)
            higher = glb.SublevelProgram(
                stated.likelihood, stated.domain, stated.level + program.level_tol
            )
            exact = native_support(higher, arms, tol=1e-12, throw=False)
            assert bool((choice.lower <= exact.upper).all())
            program.append(arms[choice.index], float(torch.rand((), generator=generator) < 0.6))


@pytest.mark.parametrize("radius", [0.05, 0.7, 4.3])
def test_the_ball_is_not_rounded_to_single_precision(radius):
    """0.7 is larger than the nearest float32: the bound of an untouched ball was 1.2e-8 too low."""
    program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(1, radius))
    choice = program.bound(torch.ones(1, 1, dtype=DOUBLE), radius=1.0, tol=1e-13)
    assert choice.upper.item() >= radius
    assert choice.lower.item() <= radius
    assert choice.upper.item() - choice.lower.item() <= 1e-13 * (1 + radius)


def test_a_minimum_between_two_points_of_equal_loss_is_found():
    """Newton's step from the sphere ends on its other side, where the loss is the same."""
    from problems import custom_family

    program = glb.AnchoredProgram(custom_family(), glb.Ball(2, 4.0))
    x = torch.tensor([0.6, -0.7], dtype=DOUBLE)
    arms = torch.eye(2, dtype=DOUBLE)
    for reward in (1.0, -1.0):
        program.append(x, reward)
        program.argmax(arms, radius=2.0)
    minimum = program.minimum()
    assert minimum.loss.item() == pytest.approx(2.0, abs=1e-6)
    assert (minimum.loss - minimum.lower_bound).item() <= program.level_tol


# ---- the same bits ------------------------------------------------------------------------------

BATCH = 6


def runs(make, worlds, order, parts, rounds=20):
    """Choices and bounds of replicates in some order, split into parts, put back into their order."""
    found = {}
    for part in parts:
        chosen = [order[i] for i in part]
        policy = make(len(chosen), torch.tensor(chosen))
        said = []
        for arms, noise in worlds[:rounds]:
            mine = arms[chosen]
            index, extra = policy.step(mine)
            x = mine[torch.arange(len(chosen)), index]
            policy.learn(x, (noise[chosen] < 0.3 + 0.4 * (x[:, 0] > 0)).double())
            said.append(torch.cat([index[:, None].double(), extra], -1))
        for place, b in enumerate(chosen):
            found[b] = torch.stack([step[place] for step in said])
    return torch.stack([found[b] for b in sorted(found)])


class ProgramPlayer:
    def __init__(self, count, replicates):
        self.program = glb.AnchoredProgram(glb.Bernoulli(), glb.Ball(3, S), (count,), anchors=16)

    def step(self, arms):
        choice = self.program.argmax(arms, radius=2.0)
        return choice.index, torch.cat([choice.upper, choice.lower, choice.passes[:, None]], -1)

    def learn(self, x, r):
        self.program.append(x, r)


class PolicyPlayer:
    def __init__(self, name):
        self.name = name

    def __call__(self, count, replicates):
        new = copy.copy(self)
        new.policy = glb.policies.make(
            self.name,
            family=glb.Bernoulli(),
            domain=glb.Ball(3, S),
            horizon=100,
            batch_shape=(count,),
            replicates=replicates,
        )
        return new

    def step(self, arms):
        index = self.policy.select(arms)
        ends = self.policy.bounds(arms[:, 0])
        return index, torch.stack([ends.lower, ends.upper], -1)

    def learn(self, x, r):
        self.policy.update(x, r)


PLAYERS = {"program": ProgramPlayer} | {n: PolicyPlayer(n) for n in ("ofuglb", "ofuglb-pb", "emk")}


@pytest.mark.parametrize("name", PLAYERS)
def test_replicates_have_the_same_bits_in_any_batch(name, generator):
    """Together, permuted, split, alone, and with one thread or two."""
    make = PLAYERS[name]
    worlds = [
        (directions(generator, BATCH, 5, 3), torch.rand(BATCH, generator=generator))
        for _ in range(20)
    ]
    plain = list(range(BATCH))
    together = runs(make, worlds, plain, [plain])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for order, parts in (
                (plain, [plain]),
                ([4, 2, 0, 5, 1, 3], [plain]),
                (plain, [[0, 3], [1, 2, 4, 5]]),
                (plain, [[b] for b in plain]),
            ):
                assert torch.equal(runs(make, worlds, order, parts), together)
    finally:
        torch.set_num_threads(threads)


def test_static_solves_have_the_same_bits_in_any_batch(generator):
    X, arms = directions(generator, BATCH, 40, 3), directions(generator, BATCH, 5, 3)
    r = (torch.rand(BATCH, 40, generator=generator) < 0.6).double()
    ball, family = glb.Ball(3, S), glb.Bernoulli()

    def solve(chosen):
        rows = glb.Rows(X[chosen], r[chosen])
        fit = glb.constrained_mle(family, rows, ball)
        loss = glb.NegativeLogLikelihood(family, *rows)
        found = glb.support(glb.SublevelProgram(loss, ball, fit.loss + 2.0), arms[chosen])
        return torch.cat(
            [fit.theta, fit.loss[:, None], found.upper, found.lower, found.theta.flatten(1)], -1
        )

    plain = list(range(BATCH))
    together, threads = solve(plain), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            order = [4, 2, 0, 5, 1, 3]
            assert torch.equal(solve(order), together[order])
            assert torch.equal(torch.cat([solve([b]) for b in plain]), together)
    finally:
        torch.set_num_threads(threads)


# ---- copies and questions ------------------------------------------------------------------------

NAMES = ["ofuglb", "ofuglb-pb", "emk", "ofuglb-e", "evill"]


def policy_of(name):
    return glb.policies.make(
        name, family=glb.Bernoulli(), domain=glb.Ball(3, S), horizon=100, batch_shape=(2,), seed=5
    )


def play_policy(policy, seed, rounds, ask=None):
    generator, chosen = torch.Generator().manual_seed(seed), []
    for _ in range(rounds):
        arms = directions(generator, 2, 6, 3)
        if ask is not None:
            ask(policy, arms)
        index = policy.select(arms)
        x = arms[torch.arange(2), index]
        policy.update(x, (torch.rand(2, generator=generator) < 0.6).double())
        chosen.append(index)
    return torch.stack(chosen)


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_policies_continue_bit_by_bit(name):
    """Also between a choice and its reward, and a load into a policy that has played elsewhere."""
    policy = policy_of(name)
    play_policy(policy, 1, 15)
    policy.select(directions(torch.Generator().manual_seed(9), 2, 6, 3))
    loaded = policy_of(name)
    play_policy(loaded, 2, 15)
    loaded.load_state_dict(pickle.loads(pickle.dumps(policy.state_dict())))
    others = [copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), loaded]
    chosen = play_policy(policy, 3, 15)
    for other in others:
        assert torch.equal(play_policy(other, 3, 15), chosen)
        assert same(other.state_dict(), policy.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_questions_and_trackers_change_nothing(name):
    asked, silent = policy_of(name), policy_of(name)
    tracker = asked.tracker()

    def ask(policy, arms):
        policy.scores(arms)
        policy.estimate()
        policy.confidence_set()
        policy.bounds(arms[:, 0])
        _ = policy.passes
        tracker.bounds(arms[:, 1])

    assert torch.equal(play_policy(asked, 3, 15, ask), play_policy(silent, 3, 15))
    assert same(asked.state_dict(), silent.state_dict())


@pytest.mark.parametrize("name", ["ofuglb", "ofuglb-pb", "emk"])
def test_a_tracker_follows_a_policy_that_was_loaded(name):
    """Another history of the same length: bounds by the old sums would be wrong."""
    policy, other = policy_of(name), policy_of(name)
    play_policy(policy, 1, 20)
    play_policy(other, 2, 20)
    x = directions(torch.Generator().manual_seed(9), 2, 3)
    tracker = policy.tracker()
    tracker.bounds(x)
    policy.load_state_dict(other.state_dict())
    ends, exact = tracker.bounds(x), other.confidence_set().interval(x)
    assert bool((ends.upper >= exact.upper - 1e-6).all())
    assert bool((ends.lower <= exact.lower + 1e-6).all())


def test_objects_of_inference_mode_go_on_outside(generator):
    with torch.inference_mode():
        program = played(generator, rounds=5, anchors=8)
        policy = policy_of("ofuglb")
        play_policy(policy, 1, 5)
    for _ in range(5):
        program.append(*row(program, generator))
        check(program, directions(generator, 2, 6, 2))
    twin = policy_of("ofuglb")
    play_policy(twin, 1, 5)
    assert torch.equal(play_policy(policy, 2, 5), play_policy(twin, 2, 5))


@pytest.mark.parametrize("name", ["ts", "evill", "random"])
def test_an_interrupted_load_leaves_the_random_numbers_too(name):
    policy, other = policy_of(name), policy_of(name)
    play_policy(other, 1, 5)
    state, before = other.state_dict(), policy.state_dict()
    own, aware = inspect.getfile(type(policy.random)), copy.deepcopy(policy)
    calls = Strike.count(lambda: aware.load_state_dict(state), own)
    for call in range(1, calls):  # the last is that of the counter
        struck = copy.deepcopy(policy)
        with pytest.raises(KeyboardInterrupt), Strike(call, own):
            struck.load_state_dict(state)
        assert same(struck.state_dict(), before)
