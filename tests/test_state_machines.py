"""Append, refuse, query, copy, save, load, interrupt in any order: the answers of a fresh object.

Hypothesis invents the orders. A few examples run by default, 2000 of each machine in the slow run.
"""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor

import torchglb as glb
from torchglb import policies
from torchglb.errors import InputError
from torchglb.testing.policies import Interruption, assert_same, reload

F64 = torch.float64
FAMILY, BALL = glb.Bernoulli(), glb.Ball(2, 3.0)
ARMS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8], [0.3, -0.4]], dtype=F64)

angles = st.integers(0, 11).map(lambda k: k * math.pi / 6 + 0.1)
lengths = st.sampled_from([0.0, 1e-9, 0.4, 1.0])
row = st.tuples(angles, lengths, st.sampled_from([0.0, 0.5, 1.0]))
rows = st.lists(row, min_size=1, max_size=4)


def tensors(drawn: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor]:
    """Rows ``(k, 2)`` and rewards ``(k)``."""
    x = [[length * math.cos(angle), length * math.sin(angle)] for angle, length, _ in drawn]
    return torch.tensor(x, dtype=F64), torch.tensor([r for _, _, r in drawn], dtype=F64)


def without_reserve(state: Any) -> Any:
    """A state without the sizes of buffers."""
    if not isinstance(state, dict):
        return state
    return {key: without_reserve(part) for key, part in state.items() if key != "capacity"}


class Machine(RuleBasedStateMachine):
    """What all machines do; subclasses say what the object is and what its answers are."""

    def __init__(self) -> None:
        super().__init__()
        self.subject: Any = self.fresh()
        self.rows: list[tuple[float, float, float]] = []
        #: sums may be behind the rows until the next call mends them, whatever that call is
        self.was_interrupted = False

    # ---- what a subclass says -------------------------------------------------------------

    def fresh(self) -> Any:
        """A new object."""
        raise NotImplementedError

    def add(self, subject: Any, x: Tensor, r: Tensor) -> None:
        """Gives rows to an object."""
        raise NotImplementedError

    def count(self, subject: Any) -> int:
        """How many rows it says it has."""
        raise NotImplementedError

    def ask(self, subject: Any) -> Any:
        """Its answers."""
        raise NotImplementedError

    def agree(self, mine: Any, other: Any) -> None:
        """Asserts that answers are the same."""
        raise NotImplementedError

    def kept(self) -> dict[str, Any]:
        """The state, without caches that a question may fill, and without memory held in reserve."""
        return without_reserve(reload(self.subject.state_dict()))

    # ---- what may happen ------------------------------------------------------------------

    @rule(drawn=rows)
    def append(self, drawn):
        self.add(self.subject, *tensors(drawn))
        self.rows += drawn
        self.was_interrupted = False

    @rule(drawn=row, fault=st.sampled_from(["long", "nan", "reward", "shape"]))
    def refuse(self, drawn, fault):
        x, r = tensors([drawn])
        before = self.kept()
        x = {"long": x + 3.0, "nan": x * math.nan, "shape": x[:, :1]}.get(fault, x)
        r = r + 7.0 if fault == "reward" else r
        with pytest.raises(InputError):
            self.add(self.subject, x, r)
        if not self.was_interrupted:
            assert_same(self.kept(), before)

    @rule()
    def query(self):
        before = self.kept()
        first, second = self.ask(self.subject), self.ask(self.subject)
        self.agree(first, second)
        if not self.was_interrupted:
            assert_same(self.kept(), before)

    @rule(how=st.sampled_from(["deepcopy", "pickle"]), drawn=rows)
    def copy(self, how, drawn):
        copied = (
            copy.deepcopy(self.subject)
            if how == "deepcopy"
            else pickle.loads(pickle.dumps(self.subject))
        )
        self.add(self.subject, *tensors(drawn))  # the copy must not see this
        self.subject = copied

    @rule(drawn=st.none() | rows)
    def save_and_load(self, drawn):
        state = reload(self.subject.state_dict())
        other = self.fresh()
        if drawn is not None:  # into one that knows other things
            self.add(other, *tensors(drawn))
        other.load_state_dict(state)
        assert_same(reload(other.state_dict()), state)
        self.subject = other

    @rule(drawn=rows, call=st.integers(1, 60))
    def interrupt(self, drawn, call):
        x, r = tensors(drawn)
        try:
            with Interruption(call):
                self.add(self.subject, x, r)
        except KeyboardInterrupt:
            self.was_interrupted = True
        found = self.count(self.subject)
        assert found in (len(self.rows), len(self.rows) + len(drawn))
        if found != len(self.rows):
            self.rows += drawn

    @precondition(lambda self: self.rows)
    @rule()
    def compare_with_a_fresh_one(self):
        assert self.count(self.subject) == len(self.rows)
        other = self.fresh()
        self.add(other, *tensors(self.rows))
        self.agree(self.ask(self.subject), self.ask(other))

    def teardown(self):
        if self.rows:
            self.compare_with_a_fresh_one()


class HistoryMachine(Machine):
    """Rows as they were given, in their order."""

    def fresh(self):
        return glb.History(2, family=FAMILY)

    def add(self, subject, x, r):
        subject.append(x, r)

    def count(self, subject):
        return len(subject)

    def ask(self, subject):
        held = subject.rows()
        return held.X, held.r, subject.w

    def agree(self, mine, other):
        for one, two in zip(mine, other, strict=True):
            assert torch.equal(one, two)


class MergedHistoryMachine(HistoryMachine):
    """Repeated rows are merged: the loss is that of all of them."""

    def fresh(self):
        return glb.History(2, aggregate=True, family=FAMILY)

    def count(self, subject):
        return round(float(subject.w.sum()))

    def ask(self, subject):
        loss = glb.NegativeLogLikelihood(FAMILY, subject.X, subject.r, subject.w)
        return (torch.stack([loss.value(2.0 * arm) for arm in ARMS]),)

    def agree(self, mine, other):
        torch.testing.assert_close(mine[0], other[0], rtol=1e-12, atol=1e-12)


class SequenceMachine(Machine):
    """Intervals of a confidence sequence whose radius depends on the rows alone."""

    def fresh(self):
        return glb.ConfidenceSequence(FAMILY, BALL, 0.05, "mean-loss")

    def add(self, subject, x, r):
        subject.update(x, r)

    def count(self, subject):
        return len(subject.history)

    def kept(self):
        return super().kept() | {"estimator": None}  # where the next fit begins: a cache

    def ask(self, subject):
        found = subject.current().interval(ARMS)
        return found.lower, found.upper

    def agree(self, mine, other):
        for one, two in zip(mine, other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


class ProgramMachine(Machine):
    """Certified bounds of the incremental program, beside those of the static solver."""

    def fresh(self):
        return glb.AnchoredProgram(FAMILY, BALL, anchors=4)

    def add(self, subject, x, r):
        subject.append(x, r)

    def count(self, subject):
        return len(subject.history)

    def ask(self, subject):
        found = subject.fork().bound(ARMS, radius=2.0)  # which places anchors, in the fork
        return found.lower, found.upper

    def agree(self, mine, other):
        # each program knows its level to ``level_tol`` only, so ends differ by what that moves them
        for one, two in zip(mine, other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)

    @precondition(lambda self: self.rows)
    @rule()
    def decide(self):
        """Moves anchors, and must name an arm that is best to 1e-6."""
        self.subject.bound(ARMS, radius=2.0)
        choice = int(self.subject.argmax(ARMS, radius=2.0).index)
        lower, upper = self.ask(self.subject)
        assert upper[choice] >= lower.max() - 1e-6

    @precondition(lambda self: self.rows)
    @rule()
    def beside_the_static_solver(self):
        """``upper`` holds for the exact level, ``lower`` for that level and what is not known of it."""
        lower, upper = self.ask(self.subject)
        minimum = self.subject.minimum()
        slack = minimum.loss - minimum.lower_bound
        x, r = tensors(self.rows)
        loss = glb.NegativeLogLikelihood(FAMILY, x, r)
        least = glb.constrained_mle(FAMILY, glb.Rows(x, r), BALL, tol=1e-13, throw=False)
        exact = glb.SublevelProgram(loss, BALL, least.loss - least.gap + 2.0)
        raised = glb.SublevelProgram(loss, BALL, least.loss + slack + 2.0)
        assert bool((upper >= glb.support(exact, ARMS).lower - 1e-12).all())
        assert bool((lower <= glb.support(raised, ARMS).upper + 1e-12).all())
        torch.testing.assert_close(upper, glb.support(exact, ARMS).upper, rtol=0, atol=1e-5)

    def teardown(self):
        super().teardown()
        if self.rows:
            self.beside_the_static_solver()


class PolicyMachine(Machine):
    """The scores of an exact policy."""

    def fresh(self):
        return policies.make("ofuglb", family=FAMILY, domain=BALL)

    def add(self, subject, x, r):
        subject.update(x, r)

    def count(self, subject):
        return subject.rounds

    def ask(self, subject):
        return subject.scores(ARMS)

    def agree(self, mine, other):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)

    @rule()
    def select(self):
        chosen = int(self.subject.select(ARMS))
        scores = self.ask(self.subject)
        assert scores[chosen] >= scores.max() - 1e-5


MACHINES = [HistoryMachine, MergedHistoryMachine, SequenceMachine, ProgramMachine, PolicyMachine]


def run(machine: type[Machine], examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_gives_the_answers_of_a_fresh_object(machine):
    run(machine, examples=15, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_many(machine):
    run(machine, examples=2000, steps=8)
