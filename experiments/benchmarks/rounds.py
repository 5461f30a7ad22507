"""A whole round of OFUGLB, ``select`` and ``update``, against SLSQP as in the paper's code.

The paper's logistic bandit, K = 20 arms, S = 4, with fresh arms in every round and with a fixed
set. Ours are public policies that check the values they are given, for B replicates at once, shown
per replicate. SLSQP finds the estimate, from the last one, and then the maximiser of every arm,
with the loss, the gradients and the tolerance of the paper's public code; it solves one replicate.
Times are medians of CPU time on one core, of all in turn; what it takes to read the clock, some
microseconds, is measured in every round and taken off. ``worst`` is the longest of 5000 rounds
of one bandit over their median; what was imported is kept from Python's garbage collector there
(``gc.freeze``), whose walk over it takes a hundred milliseconds once in some thousand rounds,
whoever plays.
"""

import gc
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks._bandit import DELTA, FAMILY, draw_arms, radius
from benchmarks._record import circumstances, write
from benchmarks.ucb import PUBLIC, slsqp_round
from threadpoolctl import threadpool_limits
from torch import Tensor

import torchglb as glb
from torchglb import policies

S, K = 4.0, 20
BATCHES = (1, 10, 40)
#: how many times faster than SLSQP, by B and d, at n = 1000; half as many for a fixed arm set
BARS = {
    (1, 2): 200, (1, 5): 250, (1, 10): 80, (1, 20): 120,
    (40, 2): 900, (40, 5): 400, (40, 10): 110, (40, 20): 220,
}  # fmt: skip
#: the same at n = 10 000
LATE_BARS = {(40, 2): 2500}
WORST = 30.0


@dataclass
class Game:
    """A policy with a batch of replicates, which it plays.

    Attributes:
        d: features.
        batch: B.
        fixed: whether the arms are the same in every round.
    """

    d: int
    batch: int
    fixed: bool
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        ball = glb.Ball(self.d, S)
        shape = () if self.batch == 1 else (self.batch,)
        self.policy = policies.make(
            "ofuglb", family=FAMILY, domain=ball, delta=DELTA, batch_shape=shape
        )
        self.generator = torch.Generator().manual_seed(0)
        self.theta_star = torch.full((self.d,), (S - 1.0) / math.sqrt(self.d), dtype=torch.float64)
        self.shape = shape
        self.kept = draw_arms(self.generator, *shape, K, self.d)
        self.rows: list[tuple[Tensor, Tensor]] = []

    def fill(self, n: int) -> None:
        """Random rows: of the ball, or of the fixed arms."""
        if self.fixed:
            index = torch.randint(0, K, (*self.shape, n, 1), generator=self.generator)
            x = self.kept.gather(-2, index.expand(*self.shape, n, self.d))
        else:
            x = draw_arms(self.generator, *self.shape, n, self.d)
        r = FAMILY.sample(x @ self.theta_star, self.generator)
        self.policy.update(x, r)
        self.rows.append((x, r))

    def arms(self) -> Tensor:
        """Those of this round."""
        return self.kept if self.fixed else draw_arms(self.generator, *self.shape, K, self.d)

    def play(self, rounds: int) -> None:
        """So many rounds, each timed."""
        for _ in range(rounds):
            arms = self.arms()
            began = time.process_time()
            index = self.policy.select(arms)
            ended = time.process_time()
            clock = time.process_time() - ended
            chosen = ended - began - clock
            place = index[..., None, None].expand(*self.shape, 1, self.d)
            x = arms.gather(-2, place)[..., 0, :]
            r = FAMILY.sample(x @ self.theta_star, self.generator)
            began = time.process_time()
            self.policy.update(x, r)
            self.seconds.append(chosen + time.process_time() - began - clock)
            self.rows.append((x[..., None, :], r[..., None]))

    def seconds_per_replicate(self) -> float:
        """The median."""
        return statistics.median(self.seconds) / self.batch


class Peer:
    """SLSQP on the rows of a game with one replicate."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.seconds: list[float] = []

    def play(self) -> None:
        """One round, timed."""
        x = torch.cat([row for row, _ in self.game.rows], dim=-2)
        r = torch.cat([reward for _, reward in self.game.rows], dim=-1)
        X, rewards = np.ascontiguousarray(x.numpy()), np.ascontiguousarray(r.numpy())
        d, n = self.game.d, len(rewards)
        ball = glb.Ball(d, S)
        before = glb.constrained_mle(FAMILY, glb.Rows(x[:-1], r[:-1]), ball).theta.numpy()
        loss = float(glb.constrained_mle(FAMILY, glb.Rows(x, r), ball).loss)
        arms = self.game.arms().numpy()
        began = time.process_time()
        slsqp_round(X, rewards, loss + radius(n + 1, d, S), arms, before, PUBLIC)
        self.seconds.append(time.process_time() - began)


def race(d: int, n: int, fixed: bool, turns: int, rounds: int) -> tuple[float, dict[int, Game]]:
    """Seconds of SLSQP per round, and the games with their times."""
    games = {batch: Game(d, batch, fixed) for batch in BATCHES}
    for game in games.values():
        game.fill(n - min(200, n // 2))
        game.play(min(200, n // 2))
        game.seconds.clear()
    peer = Peer(games[1])
    for _ in range(turns):  # in turn, so that noise hits all alike
        peer.play()
        for batch, game in games.items():
            game.play(max(rounds // (turns * (1 if batch == 1 else 5)), 1))
    return statistics.median(peer.seconds), games


def verdict(ratio: float, bar: float) -> str:
    """A ratio, and whether its bar is met, if there is one."""
    if not bar:
        return f"{ratio:>7.0f}x        "
    return f"{ratio:>7.0f}x {'met' if ratio >= bar else 'MISSED':>6} "


def measured(quick: bool, n: int, d: int, fixed: bool) -> dict[str, Any]:
    """One row of the table, printed and returned."""
    peer, games = race(d, n, fixed, 2 if quick else 5, 20 if quick else 400)
    arms = "fixed" if fixed else "fresh"
    text = f"{arms:>5} {n:>6} {d:>3} {1e3 * peer:>9.2f} "
    ours = {}
    for batch, game in games.items():
        mine = game.seconds_per_replicate()
        bars: dict[tuple[int, int], int] = {1000: BARS, 10_000: LATE_BARS}.get(n, {})
        bar = bars.get((batch, d), 0) / (2.0 if fixed else 1.0)
        text += f"{1e6 * mine:>11.1f} {verdict(peer / mine, bar)}"
        ours[str(batch)] = {"us": 1e6 * mine, "ratio": peer / mine}
    print(text, flush=True)
    return {"arms": arms, "n": n, "d": d, "slsqp_ms": 1e3 * peer, "ours": ours}


def worst_round(d: int, rounds: int) -> dict[str, Any]:
    """The longest of so many rounds of one bandit, over their median; printed and returned."""
    game = Game(d, 1, fixed=False)
    game.fill(200)
    game.play(rounds)
    worst = max(game.seconds[10:]) / statistics.median(game.seconds)
    met = "met" if worst <= WORST else "MISSED"
    print(f"worst of {rounds} rounds over their median, d = {d}: {worst:.1f} ({met}, {WORST:g})")
    return {"d": d, "rounds": rounds, "ratio": worst}


def run(quick: bool, record: Path | None = None) -> None:
    torch.set_num_threads(1)
    kept: dict[str, Any] = circumstances() | {"S": S, "K": K, "quick": quick}
    print(__doc__)
    head = "".join(f"{f'us, B = {b}':>11} {'ratio':>8} {'bar':>6} " for b in BATCHES)
    print(f"{'arms':>5} {'n':>6} {'d':>3} {'SLSQP ms':>9} {head}")
    sizes = [(n, d) for n in ((300,) if quick else (1000, 10_000)) for d in (2, 5, 10, 20)]
    with threadpool_limits(1):  # idle threads of NumPy's wait by spinning, which is CPU time
        kept["rows"] = [measured(quick, n, d, fixed) for fixed in (False, True) for n, d in sizes]
        gc.collect()
        gc.freeze()
        kept["worst"] = [worst_round(d, 200 if quick else 5000) for d in (2, 10)]
    if record is not None:
        write(record, kept)
