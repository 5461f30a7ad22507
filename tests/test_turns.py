"""Threads that share what learns: no row is lost, and no bound is wrong."""

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import torchglb as glb
from torchglb import policies
from torchglb.policies.exact import ExactPolicy
from torchglb.turns import TakesTurns

THREADS, ROUNDS = 4, 60
FAMILY, BALL = glb.Bernoulli(), glb.Ball(2, 4.0)
THETA = torch.tensor([1.0, -2.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(play: Callable[[torch.Generator], None]) -> None:
    """All threads play; whatever one raises is raised."""
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(ROUNDS):
                play(generator)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def draw(generator: torch.Generator, count: int) -> Tensor:
    arms = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(arms, dim=-1)


@pytest.mark.parametrize("name", ["ofuglb", "ofuglb-pb", "ofulog+", "emk", "ofuglb-e"])
def test_a_policy_serves_threads(name: str) -> None:
    policy = policies.make(name, family=FAMILY, domain=BALL)
    rows: list[tuple[Tensor, Tensor]] = []

    def play(generator: torch.Generator) -> None:
        arms = draw(generator, 20)
        x = arms[policy.select(arms)]
        r = FAMILY.sample(x @ THETA, generator)
        policy.update(x, r)
        rows.append((x, r))

    at_once(play)
    assert policy.rounds == len(rows) == THREADS * ROUNDS
    found = policy.confidence_set()
    assert found is not None
    held = policy._observed()
    if not isinstance(policy, ExactPolicy):
        return
    given = sorted((*x.tolist(), float(r)) for x, r in rows)
    kept = held.rows()
    assert sorted((*x.tolist(), float(r)) for x, r in zip(kept.X, kept.r, strict=True)) == given
    for slot in range(8):
        policy._program.self_check(slot)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    carried, fresh = policy.bounds(x), found.interval(x)
    assert carried.lower <= fresh.lower + 1e-7
    assert carried.upper >= fresh.upper - 1e-7
    assert carried.lower <= THETA[0] <= carried.upper


def test_sequences_and_heads_serve_threads() -> None:
    sequence = glb.ConfidenceSequence(FAMILY, BALL, 0.05)
    head = glb.GLMHead(torch.nn.Identity(), FAMILY, BALL, delta=0.05)
    contrast = glb.ContrastSequence(FAMILY, BALL, [[1.0, 0.0]], delta=0.05)
    pairs = glb.PreferenceSequence(2, S=4.0, delta=0.05)
    weight = torch.tensor(0.5, dtype=torch.float64)

    def play(generator: torch.Generator) -> None:
        x, y = draw(generator, 2)
        r = FAMILY.sample(x @ THETA, generator)
        sequence.update(x, r, weight)
        contrast.update(x, r)
        pairs.update(x, y, r)
        head.update(x[None].float(), r[None])

    at_once(play)
    total = THREADS * ROUNDS
    assert len(sequence) == len(contrast) == len(pairs) == len(head) == total
    assert len(head.sequence()) == total
    rows = sequence.history.rows()
    again = glb.ConfidenceSequence(FAMILY, BALL, 0.05)
    again.update(rows.X, rows.r, rows.w)
    level, expected = sequence.evaluation().level, again.evaluation().level
    assert abs(float(level - expected)) < 0.2  # of which posterior is held the order decides


class Doubling(TakesTurns):
    in_turn = ("add",)

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class Nested(Doubling):
    def add(self) -> None:
        before = self.count
        super().add()  # takes the turn that it has
        self.count = before + 1


def test_copies_have_turns_of_their_own() -> None:
    counter = Nested()
    with counter._turns:
        for copied in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
            thread = threading.Thread(target=copied.add)
            thread.start()
            thread.join(10.0)
            assert not thread.is_alive()
            assert copied.count == 1
        waiting = threading.Thread(target=counter.add)
        waiting.start()
        waiting.join(0.05)
        assert counter.count == 0
    waiting.join(10.0)
    assert counter.count == 1


def test_methods_of_subclasses_take_turns() -> None:
    at_once_counter = Nested()
    at_once(lambda _: at_once_counter.add())
    assert at_once_counter.count == THREADS * ROUNDS


def test_what_is_refused_leaves_the_turn_to_others() -> None:
    policy = policies.make("ofuglb", family=FAMILY, domain=BALL)
    with pytest.raises(glb.InputError):
        policy.update([3.0, 0.0], 1.0)
    thread = threading.Thread(target=policy.update, args=([1.0, 0.0], 1.0))
    thread.start()
    thread.join(10.0)
    assert policy.rounds == 1


def _learners() -> Iterator[TakesTurns]:
    yield glb.ConfidenceSequence(FAMILY, BALL, 0.05, "pac-bayes")
    yield glb.ContrastSequence(FAMILY, BALL, [[1.0, 0.0]], 0.05)
    yield glb.GLMHead(torch.nn.Identity(), FAMILY, BALL, delta=0.05)
    yield policies.make("emk", family=FAMILY, domain=BALL)


@pytest.mark.parametrize("learner", list(_learners()), ids=lambda learner: type(learner).__name__)
def test_a_shallow_copy_learns_by_itself(learner: TakesTurns) -> None:
    """One that shared its rows with the original, but not its sums, had a set far from the truth."""
    rows = torch.tensor([[0.6, 0.8], [1.0, 0.0]], dtype=torch.float64)
    learner.update(rows, [1.0, 0.0])
    copied = copy.copy(learner)
    before = repr(copied.state_dict())
    for _ in range(3):
        learner.update(rows, [0.0, 1.0])
    assert repr(copied.state_dict()) == before
    copied.update(rows, [0.0, 1.0])
    expected = copy.deepcopy(copied)
    learner.update(rows, [1.0, 1.0])
    assert repr(copied.state_dict()) == repr(expected.state_dict())
