"""Leaderboards under adaptive pairing: how often an interval or a range of ranks is wrong.

    python experiments/leaderboard_validity.py [--quick] [--runs 200] [--keep runs.jsonl]

Each run draws scores, lets the competitors that seem best meet again and again, and looks after
every batch of battles. A run is missed if at any look any true difference of scores is outside its
interval, or any true rank outside its range. Beside it, on the same battles, percentile bootstrap
intervals of the differences, as arenas use them: each at its own level, and corrected for the
number of pairs (Bonferroni). A run takes some seconds; with `--keep` each is written down when it
is done, and those that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.stats

from torchglb.preferences import battles_of, leaderboard
from torchglb.preferences.bradley_terry import BattleLoss, BattleRows, fit_scores
from torchglb.report.tables import aligned


def bootstrap(
    rows: BattleRows, K: int, resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """Scores of resampled battles, ``(resamples, K)``."""
    counts = np.stack([rows.wins, rows.weight - rows.wins]).ravel()
    n = round(counts.sum())
    found = []
    for _ in range(resamples):
        drawn = generator.multinomial(n, counts / counts.sum()).reshape(2, -1).astype(float)
        part = rows._replace(weight=np.maximum(drawn.sum(0), 1e-9), wins=drawn[0])
        found.append(fit_scores(BattleLoss(part, np.zeros(K, np.int64)), 3.0 * K**0.5).at.theta[:K])
    return np.array(found)


def outside(true: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    return bool(((true < low - 1e-12) | (true > high + 1e-12)).any())


def one_run(
    seed: int, K: int, looks: int, batch: int, delta: float, resamples: int
) -> tuple[list[bool], list[float]]:
    """Which of the methods were ever wrong, and their mean widths at the end."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=K)
    ranks = np.argsort(np.argsort(-scores)) + 1
    missed, widths = [False] * 3, [0.0] * 3
    left: list[str] = []
    right: list[str] = []
    won: list[float] = []
    pairs = [(i, j) for i in range(K) for j in range(i)]
    order = list(range(K))
    for look in range(looks):
        top = order[:3]
        chosen = pairs if look == 0 else [(top[0], top[1]), (top[1], top[2]), (top[0], top[2])]
        for t in range(batch):
            i, j = chosen[t % len(chosen)]
            left.append(str(i))
            right.append(str(j))
            won.append(float(generator.random() < 1 / (1 + np.exp(scores[j] - scores[i]))))
        battles = battles_of(left, right, won)
        board = leaderboard(battles, delta=delta)
        order = [int(name) for name in board.names]
        true = scores[order][:, None] - scores[order][None, :]
        wrong = outside(true, board.difference_lower, board.difference_upper)
        wrong |= outside(ranks[order], board.best_rank, board.worst_rank)
        missed[0] |= wrong
        widths[0] = float((board.difference_upper - board.difference_lower).mean())
        place = [battles.names.index(str(i)) for i in order]
        drawn = bootstrap(battles.rows, K, resamples, generator)[:, place]
        gaps = drawn[:, :, None] - drawn[:, None, :]
        for number, level in ((1, delta), (2, delta / len(pairs))):
            low, high = np.quantile(gaps, [level / 2, 1 - level / 2], axis=0)
            missed[number] |= outside(true, low, high)
            widths[number] = float((high - low).mean())
    return missed, widths


def all_runs(given: argparse.Namespace) -> list[tuple[list[bool], list[float]]]:
    """One after another; those of the same settings that were kept are read instead."""
    K, looks, batch, delta = given.competitors, given.looks, given.batch, given.delta
    settings = [K, looks, batch, delta]
    kept: dict[int, tuple[list[bool], list[float]]] = {}
    if given.keep is not None and given.keep.exists():
        for line in given.keep.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            if run["settings"] == settings:
                kept[run["seed"]] = run["missed"], run["widths"]
    for seed in range(given.runs):
        if seed in kept:
            continue
        missed, widths = kept[seed] = one_run(seed, K, looks, batch, delta, 100)
        print(f"run {seed + 1} of {given.runs}: missed {missed}", file=sys.stderr, flush=True)
        if given.keep is not None:
            run = {"settings": settings, "seed": seed, "missed": missed, "widths": widths}
            with given.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
    return [kept[seed] for seed in range(given.runs)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--competitors", type=int, default=5)
    parser.add_argument("--looks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=60)
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--keep", type=Path, help="a file for the runs, to go on with later")
    given = parser.parse_args(arguments)
    if given.quick:
        given.runs, given.looks = 3, 2
    found = all_runs(given)
    missed = np.array([run[0] for run in found]).sum(0)
    widths = np.array([run[1] for run in found]).mean(0)
    names = ["torchglb (all at once, all looks)", "bootstrap, each pair", "bootstrap, Bonferroni"]
    heads = ["intervals", f"runs missed of {given.runs}", "promised", "p", "mean width at the end"]
    rows = [heads]
    for name, count, width in zip(names, missed, widths, strict=True):
        test = scipy.stats.binomtest(int(count), given.runs, given.delta, alternative="greater")
        rows.append([name, str(count), f"{given.delta:g}", f"{test.pvalue:.2g}", f"{width:.2f}"])
    print("\n".join(aligned(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
