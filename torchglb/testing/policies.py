"""What every policy must do. A test class inherits :class:`PolicyContract` and names its policy."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchglb import policies
from torchglb.domain import Ball
from torchglb.errors import InputError
from torchglb.families import Bernoulli, GLMFamily
from torchglb.policies import Policy

DTYPE = torch.float64
LIBRARY = str(Path(policies.__file__).parents[1])


def unit_arms(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Random vectors of norm at most 1, ``(*shape)``."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator, dtype=DTYPE)
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    length = 0.3 + 0.7 * torch.rand((*shape[:-1], 1), generator=generator, dtype=DTYPE)
    return (rows / norm * length).to(dtype)


class World:
    """Arms and the rewards of every arm, drawn beforehand: (round, replicate, arm).

    Whoever plays the same arm in the same round of the same replicate gets the same reward.
    """

    def __init__(
        self,
        family: GLMFamily,
        rounds: int,
        replicates: int,
        arms: int,
        dim: int,
        radius: float,
        *,
        fixed: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed + 1)
        direction = torch.randn((replicates, dim), generator=generator, dtype=DTYPE)
        self.theta = (
            0.7 * radius * direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        )
        shape = (1 if fixed else rounds, replicates, arms, dim)
        self.arms = unit_arms(*shape, seed=seed).expand(rounds, -1, -1, -1)
        self.rewards = family.sample(
            (self.arms @ self.theta[..., None])[..., 0], generator
        )  # (rounds, replicates, arms)


def rows_of(world: World, index: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The rows ``(B, k, d)``, ``(B, k)`` for the arms ``index (k, B)`` of rounds start, ..."""
    rounds = slice(start, start + index.shape[0])
    place = index[..., None, None].expand(*index.shape, 1, world.arms.shape[-1])
    x = world.arms[rounds].gather(-2, place)[..., 0, :]
    r = world.rewards[rounds].gather(-1, index[..., None])[..., 0]
    return x.transpose(0, 1), r.transpose(0, 1)


def assert_same(first: Any, second: Any, where: str = "state") -> None:
    """Two saved states agree bit by bit."""
    assert type(first) is type(second), where
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype, where
        assert torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_same(first[key], second[key], f"{where}[{key!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert first == second, where


def reload(state: dict[str, Any]) -> dict[str, Any]:
    """The state written to a file and read again, without trusting the file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@cache
def _compiled() -> frozenset[CodeType]:
    """The code of every compiled function of the library."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torchglb")]
    values = [value for module in modules for value in vars(module).values()]
    return frozenset(value.py_func.__code__ for value in values if hasattr(value, "py_func"))


class Interruption:
    """Raises KeyboardInterrupt at the n-th call of one of the library's Python functions.

    In a file of one's own it strikes behind every call: of Python, of torch, of anything.
    """

    def __init__(self, call: int | None, own: str = "") -> None:
        self.call, self.own, self.calls = call, own, 0

    def __enter__(self) -> Interruption:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *failure: Any) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename == self.own:
            strikes = event in ("call", "c_return")
        else:  # Numba crashes where it is interrupted on the way in or out
            library = event == "call" and code.co_filename.startswith(LIBRARY)
            strikes = library and code not in _compiled()
        self.calls += strikes
        if strikes and self.calls == self.call:
            sys.setprofile(None)  # once
            raise KeyboardInterrupt

    @classmethod
    def count(cls, run: Callable[[], object], own: str = "") -> int:
        """How many calls there are."""
        with cls(None, own) as counting:
            run()
        return counting.calls


class PolicyContract:
    """Inherited by the test class of every policy.

    Attributes:
        name: in the registry.
        options: passed to ``make``.
        families: covered ones; the first is used where one is enough.
        uncovered: families that must be refused.
        fixed_arms: whether the arm set must be the same in every round.
        greedy: whether ``select`` is the argmax of ``scores`` (not so where choices are random
            beyond the scores, or arms are eliminated first).
        ball_arms: whether the best arm of the unit ball is known.
        tolerance: between scores computed in another order of summation.

    Example:
        >>> import torchglb as glb
        >>> class TestOFUL(PolicyContract):
        ...     name = "oful"
        ...     families = (glb.Gaussian(),)
        ...     ball_arms = False
        >>> TestOFUL.options
        {}
    """

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    families: ClassVar[tuple[GLMFamily, ...]] = (Bernoulli(),)
    uncovered: ClassVar[tuple[GLMFamily, ...]] = ()
    fixed_arms: ClassVar[bool] = False
    greedy: ClassVar[bool] = True
    ball_arms: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-6
    radius: ClassVar[float] = 2.0
    rounds: ClassVar[int] = 5

    @pytest.fixture(autouse=True)
    def _one_thread(self):
        """These problems are so small that a second thread only waits for the first."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    # ---- tools ---------------------------------------------------------------------------

    def make(
        self,
        batch_shape: tuple[int, ...] = (),
        *,
        family: GLMFamily | None = None,
        dim: int = 2,
        **settings: Any,
    ) -> Policy:
        """The policy under test, by its name in the registry."""
        settings = {"delta": 0.1, "horizon": 200, "batch_shape": batch_shape} | settings
        settings = {"domain": Ball(dim, self.radius)} | settings
        family = self.families[0] if family is None else family
        return policies.make(self.name, family=family, **(self.options | settings))

    def world(self, replicates: int, *, rounds: int | None = None, **changes: Any) -> World:
        """Arms and rewards that the policy is played on; ``changes`` are those of its settings."""
        settings = {"arms": 4, "dim": 2, "radius": self.radius, "fixed": self.fixed_arms} | changes
        family = settings.pop("family", self.families[0])
        return World(family, rounds or self.rounds, replicates, **settings)

    def play(self, policy: Policy, world: World, start: int, stop: int) -> Tensor:
        """Rounds start..stop-1 of a policy with one batch axis; the choices, ``(rounds, B)``."""
        choices = []
        for t in range(start, stop):
            index = policy.select(world.arms[t])
            policy.update(*(v[:, 0] for v in rows_of(world, index[None], t)))
            choices.append(index)
        return torch.stack(choices)

    # ---- the contract --------------------------------------------------------------------

    def test_is_registered(self):
        assert self.name in policies.available()
        for family in self.families:
            assert self.name in policies.available(family)
        for family in self.uncovered:
            assert self.name not in policies.available(family)

    @pytest.mark.parametrize("batch_shape", [(), (1,), (2, 3)])
    def test_shapes_and_dtypes(self, batch_shape):
        for family in self.families:
            for dtype in (torch.float64, torch.float32):
                # one ball for all, or one for each problem
                radii = torch.full(batch_shape, self.radius, dtype=torch.float64)
                ball = Ball(2, radii if len(batch_shape) > 1 else self.radius)
                policy = self.make(batch_shape, family=family, dtype=dtype, domain=ball)
                arms = unit_arms(*batch_shape, 4, 2, dtype=dtype)
                for _ in range(3):
                    index, scores = policy.select(arms), policy.scores(arms)
                    assert index.shape == batch_shape
                    assert index.dtype == torch.int64
                    assert bool(((index >= 0) & (index < 4)).all())
                    assert scores.shape == (*batch_shape, 4)
                    assert scores.dtype == dtype
                    assert bool(torch.isfinite(scores).all())
                    place = index[..., None, None].expand(*batch_shape, 1, 2)
                    policy.update(
                        arms.gather(-2, place)[..., 0, :], torch.ones(batch_shape, dtype=dtype)
                    )
                assert policy.rounds == 3

    def test_what_it_says_it_knows_changes_nothing(self):
        world = self.world(3)
        asked, silent = self.make((3,)), self.make((3,))
        for t in range(self.rounds):
            self.play(silent, world, t, t + 1)
            self.play(asked, world, t, t + 1)
            estimate, passes, region = asked.estimate(), asked.passes, asked.confidence_set()
            if estimate is not None:
                assert estimate.shape == (3, 2)
                assert bool(torch.isfinite(estimate).all())
            if passes is not None:
                assert passes.shape == (3,)
                assert bool((passes >= 0).all())
            if region is not None:
                assert estimate is not None
                assert bool((region.slack(estimate) >= -1e-6).all())
        more = self.world(3, rounds=self.rounds + 4)
        choices = [self.play(p, more, self.rounds, self.rounds + 4) for p in (asked, silent)]
        assert torch.equal(*choices)

    def test_what_it_hands_out_may_be_changed(self):
        """An estimate that is normalised in place, say, is the caller's own."""
        world = self.world(2, rounds=self.rounds + 3)
        asked = self.make((2,))
        self.play(asked, world, 0, self.rounds)
        silent = copy.deepcopy(asked)
        region = asked.confidence_set()
        center = None if region is None else region.center
        for answer in (center, asked.estimate(), asked.passes):
            if answer is not None:
                answer.detach().fill_(0.5)
        assert_same(reload(asked.state_dict()), reload(silent.state_dict()))
        later = (self.rounds, self.rounds + 3)
        choices = [self.play(p, world, *later) for p in (asked, silent)]
        assert torch.equal(*choices)

    def test_select_is_the_argmax_of_the_scores(self):
        if not self.greedy:
            pytest.skip("this policy chooses otherwise")
        for family in self.families:
            world = self.world(3, family=family)
            policy = self.make((3,), family=family)
            for t in range(self.rounds):
                saved = policy.state_dict()
                index = policy.select(world.arms[t])
                policy.load_state_dict(saved)
                scores = policy.scores(world.arms[t])
                policy.load_state_dict(saved)
                chosen = scores.gather(-1, index[:, None])[:, 0]
                assert bool((chosen >= scores.amax(-1) - self.tolerance).all())
                policy.update(*(v[:, 0] for v in rows_of(world, index[None], t)))

    def test_batch_equals_loop(self):
        names = torch.tensor([7, 2, 11])
        for family in self.families:
            world = self.world(3, family=family)
            together = self.make((3,), family=family, replicates=names)
            choices = self.play(together, world, 0, self.rounds)
            scores = together.scores(world.arms[0])
            for b in range(3):
                alone = self.make((), family=family, replicates=names[b])
                for t in range(self.rounds):
                    index = alone.select(world.arms[t, b])
                    assert int(index) == int(choices[t, b])
                    alone.update(world.arms[t, b, index], world.rewards[t, b, index])
                torch.testing.assert_close(
                    alone.scores(world.arms[0, b]), scores[b], rtol=0, atol=self.tolerance
                )

    def test_every_replicate_has_its_own_radius(self):
        radii = torch.tensor([1.0, 3.0, 2.0], dtype=DTYPE)
        names = torch.tensor([7, 2, 11])
        for family in self.families:
            world = self.world(3, family=family)
            together = self.make((3,), family=family, domain=Ball(2, radii), replicates=names)
            choices = self.play(together, world, 0, self.rounds)
            scores = together.scores(world.arms[0])
            for b in range(3):
                ball = Ball(2, float(radii[b]))
                alone = self.make((), family=family, domain=ball, replicates=names[b])
                for t in range(self.rounds):
                    index = alone.select(world.arms[t, b])
                    assert int(index) == int(choices[t, b])
                    alone.update(world.arms[t, b, index], world.rewards[t, b, index])
                torch.testing.assert_close(
                    alone.scores(world.arms[0, b]), scores[b], rtol=0, atol=self.tolerance
                )

    def test_order_of_the_batch_does_not_matter(self):
        world, names, turn = self.world(3), torch.tensor([7, 2, 11]), torch.tensor([2, 0, 1])
        first = self.make((3,), replicates=names)
        choices = self.play(first, world, 0, self.rounds)
        world.arms, world.rewards = world.arms[:, turn], world.rewards[:, turn]
        second = self.make((3,), replicates=names[turn])
        assert torch.equal(self.play(second, world, 0, self.rounds), choices[:, turn])

    def test_continues_bit_by_bit_from_a_checkpoint(self):
        world, half = self.world(2, rounds=2 * self.rounds), self.rounds
        policy = self.make((2,), seed=3)
        self.play(policy, world, 0, half)
        state = reload(policy.state_dict())
        copy = self.make((2,), seed=4)
        self.play(copy, world, 0, 2)  # whatever it knew before is replaced
        copy.load_state_dict(state)
        assert copy.rounds == half
        assert_same(copy.state_dict(), policy.state_dict())
        ahead = self.play(policy, world, half, 2 * half)
        assert torch.equal(self.play(copy, world, half, 2 * half), ahead)
        assert_same(copy.state_dict(), policy.state_dict())
        assert torch.equal(copy.scores(world.arms[0]), policy.scores(world.arms[0]))

    def test_state_does_not_share_memory(self):
        world = self.world(2)
        policy = self.make((2,))
        self.play(policy, world, 0, 3)
        state = policy.state_dict()
        frozen = reload(state)
        self.play(policy, world, 3, self.rounds)
        assert_same(state, frozen)

    def test_refuses_a_foreign_state(self):
        policy = self.make((2,))
        state = policy.state_dict()
        for broken in (state | {"policy": "somebody"}, {"policy": self.name}):
            with pytest.raises(InputError, match="state"):
                policy.load_state_dict(broken)
        if state["state"]:
            with pytest.raises(InputError, match="state"):
                policy.load_state_dict(state | {"state": {}})

    def test_delayed_and_batched_updates_equal_one_by_one(self):
        for family in self.families:
            world = self.world(2, family=family)
            single, delayed = (self.make((2,), family=family) for _ in range(2))
            choices = self.play(single, world, 0, self.rounds)
            for t in range(self.rounds):  # the rewards come later, all at once
                delayed.select(world.arms[t])
            delayed.update(*rows_of(world, choices, 0))
            assert delayed.rounds == single.rounds == self.rounds
            torch.testing.assert_close(
                delayed.scores(world.arms[0]),
                single.scores(world.arms[0]),
                rtol=0,
                atol=self.tolerance,
            )

    def test_merging_repeated_arms_changes_nothing(self):
        if "aggregate" not in policies.options_of(self.name):
            pytest.skip("this policy keeps no history")
        for family in self.families:
            rounds = 2 * self.rounds
            world = self.world(2, family=family, fixed=True, rounds=rounds)
            plain, merged = (
                self.make((2,), family=family, **(self.options | {"aggregate": aggregate}))
                for aggregate in (False, True)
            )
            choices = self.play(plain, world, 0, rounds)
            assert torch.equal(self.play(merged, world, 0, rounds), choices)
            torch.testing.assert_close(
                merged.scores(world.arms[0]),
                plain.scores(world.arms[0]),
                rtol=0,
                atol=self.tolerance,
            )

    def test_refuses_families_it_does_not_cover(self):
        for family in self.uncovered:
            with pytest.raises(InputError, match="family") as error:
                self.make(family=family)
            assert self.name in str(error.value)

    def test_refuses_a_batch_without_replicates(self):
        for batch_shape in ((0,), (2, 0)):
            with pytest.raises(InputError, match="batch_shape: expected one replicate or more"):
                self.make(batch_shape)

    def test_refuses_unknown_options(self):
        with pytest.raises(InputError, match="colour"):
            self.make(colour="blue")

    def test_refusals_leave_the_state_unchanged(self):
        world = self.world(2)
        policy = self.make((2,))
        self.play(policy, world, 0, 3)
        saved = policy.state_dict()
        x, r = rows_of(world, torch.zeros((1, 2), dtype=torch.int64), 3)
        x, r = x[:, 0], r[:, 0]
        nan = torch.full_like(r, torch.nan)
        wrong = [(x[:1], r), (x, r[:1]), (3.0 * x, r), (x, nan), (x / 0.0, r)]
        if max(abs(end) for end in policy.family.reward_range) < float("inf"):
            wrong.append((x, r + 1e3))
        for bad_x, bad_r in wrong:
            with pytest.raises(InputError):
                policy.update(bad_x, bad_r)
        arms = world.arms[3]
        for bad in (arms[:1], arms[..., :1], arms[:, :0], 3.0 * arms, arms * torch.nan, [[0.0]]):
            with pytest.raises(InputError):
                policy.select(bad)
            with pytest.raises(InputError):
                policy.scores(bad)
        assert_same(policy.state_dict(), saved)

    def test_best_arm_of_the_unit_ball(self):
        if not self.ball_arms:
            with pytest.raises(InputError, match="unit ball") as error:
                self.make((2,)).select_ball()
            assert self.name in str(error.value)
            return
        names = torch.tensor([7, 2])
        for family in self.families:
            world = self.world(2, family=family)
            policy = self.make((2,), family=family, replicates=names)
            alone = [self.make((), family=family, replicates=name) for name in names]
            for t in range(3):
                saved = policy.state_dict()
                arm = policy.select_ball()
                assert arm.shape == (2, 2)
                torch.testing.assert_close(
                    torch.linalg.vector_norm(arm, dim=-1), torch.ones(2, dtype=DTYPE)
                )
                reward = world.rewards[t, :, 0]
                lonely = []
                for b, single in enumerate(alone):
                    lonely.append(single.select_ball())
                    single.update(arm[b], reward[b])
                later = policy.state_dict()
                policy.load_state_dict(saved)
                others = torch.nn.functional.normalize(unit_arms(2, 60, 2, seed=t), dim=-1)
                # where the set touches the sphere along an arc, the best arm is not unique: the batch
                # and the replicate alone may choose differently, but each chooses a best one
                both = torch.stack([arm, torch.stack(lonely)], dim=-2)
                scores = policy.scores(torch.cat([both, others], dim=-2))
                best = scores.amax(-1, keepdim=True)
                assert bool((scores[:, :2] >= best - 2e-6 * (1.0 + best.abs())).all())
                policy.load_state_dict(later)
                policy.update(arm, reward)

    def test_one_arm(self):
        world = self.world(2, arms=1)
        choices = self.play(self.make((2,)), world, 0, self.rounds)
        assert torch.equal(choices, torch.zeros_like(choices))

    def test_duplicate_arms_and_the_zero_arm(self):
        arms = unit_arms(2, 3, 2)
        arms = torch.cat([arms, arms[:, :1], torch.zeros(2, 1, 2, dtype=DTYPE)], dim=-2)
        policy = self.make((2,))
        for t in range(self.rounds):
            index = policy.select(arms)
            assert bool(((index >= 0) & (index < 5)).all())
            row = arms.gather(-2, index[:, None, None].expand(2, 1, 2))[:, 0]
            policy.update(row, torch.full((2,), float(t % 2), dtype=DTYPE))
            scores = policy.scores(arms)
            assert bool(torch.isfinite(scores).all())
            torch.testing.assert_close(scores[:, 0], scores[:, 3], rtol=0, atol=self.tolerance)

    def test_one_dimension(self):
        world = self.world(2, dim=1)
        policy = self.make((2,), dim=1)
        choices = self.play(policy, world, 0, self.rounds)
        assert choices.shape == (self.rounds, 2)
        assert bool(torch.isfinite(policy.scores(world.arms[0])).all())

    def test_number_of_arms_may_change(self):
        if self.fixed_arms:
            pytest.skip("this policy needs a fixed arm set")
        policy = self.make((2,))
        for t, count in enumerate([3, 1, 7, 2, 5]):
            arms = unit_arms(2, count, 2, seed=t)
            index = policy.select(arms)
            assert bool((index < count).all())
            assert policy.scores(arms).shape == (2, count)
            row = arms.gather(-2, index[:, None, None].expand(2, 1, 2))[:, 0]
            policy.update(row, torch.full((2,), float(t % 2), dtype=DTYPE))
        assert policy.rounds == 5

    # ---- copies, questions, interruptions --------------------------------------------------

    @pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle"])
    def test_copies_continue_bit_by_bit(self, how):
        for family in self.families:
            world, half = self.world(2, rounds=3 * self.rounds, family=family), self.rounds
            policy = self.make((2,), family=family)
            self.play(policy, world, 0, half)
            make = getattr(copy, how, lambda policy: pickle.loads(pickle.dumps(policy)))
            copied = make(policy)
            frozen = reload(copied.state_dict())
            assert_same(frozen, reload(policy.state_dict()))
            ahead = self.play(policy, world, half, 3 * half)
            assert_same(reload(copied.state_dict()), frozen)  # nothing is shared
            assert torch.equal(self.play(copied, world, half, 3 * half), ahead)
            assert_same(reload(copied.state_dict()), reload(policy.state_dict()))

    def test_questions_leave_no_trace(self):
        for family in self.families:
            world = self.world(2, rounds=2 * self.rounds, family=family)
            asked, silent = (self.make((2,), family=family) for _ in range(2))
            for t in range(2 * self.rounds):
                self.ask(asked, world.arms[t], world.arms[t - 1])
                choices = [self.play(p, world, t, t + 1) for p in (asked, silent)]
                assert torch.equal(*choices)
                assert_same(reload(asked.state_dict()), reload(silent.state_dict()))

    @staticmethod
    def ask(policy: Policy, arms: Tensor, others: Tensor) -> None:
        """Every question there is."""
        policy.scores(arms)
        policy.scores(others)
        policy.estimate()
        policy.confidence_set()
        policy.bounds(arms[:, 0])
        policy.bounds(others[:, 1], refine=False)
        if hasattr(policy, "kept"):
            policy.kept(others)

    def test_threads_take_turns(self):
        """No row is lost where two threads play at once, and no call of one breaks the other's."""
        world, policy = self.world(2, rounds=2 * self.rounds), self.make((2,))
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(2) as pool:
                starts = (0, self.rounds)
                played = [
                    pool.submit(self.play, policy, world, start, start + self.rounds)
                    for start in starts
                ]
                choices = [one.result() for one in played]
        finally:
            sys.setswitchinterval(before)
        assert policy.rounds == 2 * self.rounds
        kept = getattr(policy.confidence_set(), "likelihood", None)
        x, _ = zip(*map(rows_of, [world] * 2, choices, starts), strict=True)
        if kept is not None and kept.num_rows == 2 * self.rounds:
            given, found = (sorted(rows[0].tolist()) for rows in (torch.cat(x, 1), kept.X))
            assert given == found
        assert bool(torch.isfinite(policy.scores(world.arms[0])).all())

    def test_no_graph_is_kept(self):
        """Of arms, rows and rewards with derivatives: it would grow, and could not be copied."""
        world, policy = self.world(2, rounds=3), self.make((2,))
        for t in range(3):
            arms = world.arms[t].clone().requires_grad_()
            index = policy.select(arms)
            x, r = (v[:, 0] for v in rows_of(world, index[None], t))
            policy.update(x.clone().requires_grad_(), r.clone().requires_grad_())
        kept = tree_leaves(copy.deepcopy(policy).state_dict())
        assert not any(v.requires_grad for v in kept if isinstance(v, Tensor))

    @pytest.mark.parametrize("masked", [False, True])
    def test_an_interrupted_update_is_all_or_nothing(self, masked):
        world = self.world(2, rounds=self.rounds + 3)
        policy = self.make((2,))
        self.play(policy, world, 0, self.rounds)
        index = policy.select(world.arms[self.rounds])[None]
        x, r = (v[:, 0] for v in rows_of(world, index, self.rounds))
        aware = copy.deepcopy(policy)
        own = inspect.getfile(type(policy))
        own = "" if own.startswith(LIBRARY) else own
        mask = torch.tensor([True, False]) if masked else None
        calls = Interruption.count(lambda: aware.update(x, r, mask=mask), own)
        rng = random.Random(0)
        for call in sorted(rng.sample(range(1, calls), min(calls - 1, 40))):
            struck = copy.deepcopy(policy)
            with pytest.raises(KeyboardInterrupt), Interruption(call, own):
                struck.update(x, r, mask=mask)
            # whether the observation is in, the number of rounds says; then the rest agrees
            expected = aware if struck.rounds == aware.rounds else policy
            sets = [copy.deepcopy(one).confidence_set() for one in (struck, expected)]
            losses = [loss for one in sets if (loss := getattr(one, "likelihood", None))]
            assert len({loss.num_rows for loss in losses}) <= 1
            torch.testing.assert_close(
                struck.scores(world.arms[0]),
                copy.deepcopy(expected).scores(world.arms[0]),
                rtol=0,
                atol=self.tolerance,
            )
            if struck.rounds == policy.rounds:
                struck.update(x, r, mask=mask)
            assert torch.equal(
                self.play(struck, world, self.rounds + 1, self.rounds + 3),
                self.play(copy.deepcopy(aware), world, self.rounds + 1, self.rounds + 3),
            )
