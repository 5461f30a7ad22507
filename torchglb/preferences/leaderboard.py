"""Leaderboards that are right at every look, however the pairs were chosen.

``P(a beats b) = sigma(s_a - s_b)``. Scores are known up to a constant, so a leaderboard states
differences, and ranks as ranges: competitor i is behind j for certain if ``max s_i - s_j < 0`` over
the confidence set. All intervals and ranges hold together, at all times, with probability 1 -
delta; bootstrap intervals do not where pairing or stopping depends on the results.

The competitors are those who may ever take part: whoever joins later, because of the results, makes
it another leaderboard.

A battle has one winner, or is a tie (half a win for both). Choices out of more than two (slates,
rankings, multinomial choice) are not covered: several pairs taken from one choice are not
independent battles.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchglb.backend import Floats, Ints
from torchglb.checks import check_count, check_positive, check_probability, refuse
from torchglb.preferences.battle_set import BattleSet
from torchglb.preferences.battles import Battles, Columns, battles_in, read_battles
from torchglb.preferences.bradley_terry import BattleLoss

#: contrasts whose bound is closed by Newton's method; all others keep the ellipsoid's
EXACT = 1000
#: what a statement with controls rests on beside: a unit that follows the results is peeking
CONTROLS = (
    " Coefficients times the largest value of their control are at most as much, and that value"
    " does not depend on results."
)
#: an exact bound leaves at least so much of the ellipsoid's half width
HOPE = 0.5


class Battle(NamedTuple):
    """Two competitors and where the difference of their scores can be.

    Example:
        >>> table = {"model_a": ["x", "x", "y"] * 40, "model_b": ["y", "z", "z"] * 40,
        ...          "winner": ["model_a", "model_a", "tie"] * 40}
        >>> battle = leaderboard(table).next_battles(1)[0]
        >>> battle.lower < battle.upper
        True
    """

    left: str
    right: str
    lower: float
    upper: float


@dataclass(frozen=True, eq=False)
class Leaderboard:
    """Scores, ranges of ranks and differences of K competitors, the best estimate first.

    Attributes:
        names: of those that battles connect, K of them.
        scores: estimates that add up to 0, ``(K,)``: those of an unpenalised fit if ``inside``.
        lower: of each score against the mean of all, ``(K,)``.
        upper: the same.
        best_rank: the best that the confidence set allows, from 1 on, ``(K,)``.
        worst_rank: the worst.
        battles: how many each had, ``(K,)``.
        difference_lower: of ``s_i - s_j``, ``(K, K)``.
        difference_upper: the same.
        coefficients: of the controls, in their own units: name, estimate, lower and upper end.
        unconnected: groups of competitors that no chain of battles connects with these: nothing is
            known of how they compare, and they have no ranks.
        inside: whether the estimate is the unpenalised one. It is not where someone has won or lost
            everything, or all battles between two groups: the bound on scores then holds it.
        delta: everything holds together with probability 1 - delta, at all times.
        spread: what was assumed: the scores' distances from their mean have a root mean square of
            at most this.

    Example:
        >>> table = {"model_a": ["x", "x", "y"] * 40, "model_b": ["y", "z", "z"] * 40,
        ...          "winner": ["model_a", "model_a", "tie"] * 40}
        >>> board = leaderboard(table)
        >>> board.names[0], board.difference_lower.shape
        ('x', (3, 3))
    """

    names: tuple[str, ...]
    scores: Floats
    lower: Floats
    upper: Floats
    best_rank: Ints
    worst_rank: Ints
    battles: Ints
    difference_lower: Floats
    difference_upper: Floats
    coefficients: tuple[tuple[str, float, float, float], ...]
    unconnected: tuple[tuple[str, ...], ...]
    inside: bool
    delta: float
    spread: float

    @property
    def statement(self) -> str:
        """What holds, in words."""
        return (
            f"With probability at least {1.0 - self.delta:.4g}, all of these intervals and ranges"
            " of ranks hold at once, at every look at the growing data and however the pairs were"
            " chosen; if each battle is decided by a difference of scores, and the scores'"
            f" distances from their mean have a root mean square of at most {self.spread:g}."
            f"{CONTROLS if self.coefficients else ''}"
        )

    @property
    def remarks(self) -> list[str]:
        """What a reader should know beside the numbers."""
        found = []
        for group in self.unconnected:
            shown = ", ".join(group[:8]) + (f" and {len(group) - 8} more" if group[8:] else "")
            found.append(f"not ranked, since no chain of battles leads to the others: {shown}")
        if not self.inside:
            control = ", or the battles do not determine a control" if self.coefficients else ""
            found.append(
                "someone has won or lost everything (or all battles between two groups)"
                f"{control}, so that the estimate is held back by the assumed bound on scores"
            )
        return found

    def difference(self, left: str, right: str) -> tuple[float, float]:
        """Where ``s_left - s_right`` can be."""
        i, j = (self._place(name) for name in (left, right))
        return float(self.difference_lower[i, j]), float(self.difference_upper[i, j])

    def _place(self, name: str) -> int:
        if name not in self.names:
            away = any(name in group for group in self.unconnected)
            expected = "a competitor that battles connect with the others"
            raise refuse("name", expected, f"{name!r}, {'unconnected' if away else 'unknown'}")
        return self.names.index(name)

    def next_battles(self, count: int = 10) -> list[Battle]:
        """Pairs whose order is open, those first whose difference is known least."""
        check_count("count", count, least=1)
        i, j = np.triu_indices(len(self.names), 1)
        low, high = self.difference_lower[i, j], self.difference_upper[i, j]
        open_ = np.flatnonzero((low <= 0.0) & (high >= 0.0))
        order = open_[np.argsort(low[open_] - high[open_], kind="stable")][:count]
        ends = zip(i[order], j[order], low[order], high[order], strict=True)
        return [Battle(self.names[a], self.names[b], float(lo), float(up)) for a, b, lo, up in ends]

    def table(self) -> list[dict[str, Any]]:
        """A row for each competitor, of plain values."""
        return [
            {
                "rank": f"{self.best_rank[i]}-{self.worst_rank[i]}"
                if self.best_rank[i] < self.worst_rank[i]
                else f"{self.best_rank[i]}",
                "name": name,
                "score": float(self.scores[i]),
                "lower": float(self.lower[i]),
                "upper": float(self.upper[i]),
                "battles": int(self.battles[i]),
            }
            for i, name in enumerate(self.names)
        ]

    def save_csv(self, path: str | os.PathLike[str]) -> Path:
        """Writes :meth:`table`, and all differences beside it (``NAME-differences.csv``)."""
        place = Path(path)
        rows = self.table()
        with place.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        pairs = place.with_name(f"{place.stem}-differences.csv")
        with pairs.open("w", newline="", encoding="utf-8") as file:
            plain = csv.writer(file)
            plain.writerow(["left", "right", "lower", "upper"])
            for i, left in enumerate(self.names):
                for j, right in enumerate(self.names[i + 1 :], start=i + 1):
                    ends = (self.difference_lower[i, j], self.difference_upper[i, j])
                    plain.writerow([left, right, *map(float, ends)])
        return place


def leaderboard(
    frame: Any,
    left: str = "model_a",
    right: str = "model_b",
    winner: str = "winner",
    controls: Sequence[str] = (),
    *,
    delta: float = 0.05,
    spread: float = 3.0,
    exact: int = EXACT,
) -> Leaderboard:
    """The leaderboard of battles, valid under adaptive pairing and at every look.

    Battles may be missing or come late, as long as that does not depend on who won, given the pair
    and the past.

    A pass over n distinct rows is O(n); the set takes some O(d^3), every exact bound about ten
    times that, d = K + C. Memory is O(n + d^2).

    Args:
        frame: a DataFrame, a table of columns by name, the path of a CSV file, or
            :class:`Battles`.
        left: the column of the first competitor.
        right: of the second one.
        winner: of the result: the name of either column, ``left``, ``right``, ``tie`` (or
            LMSYS's ``tie (bothbad)``), the name of the winner, or a number in [0, 1].
        controls: columns of numbers that count for the first and against the second competitor,
            such as a difference of lengths. The largest value of each is its unit, in which the
            prior is measured: it must not depend on results. Cut them off at a number that is
            fixed beforehand if larger ones may come, and have a value of that size from the start.
        delta: the failure probability.
        spread: an assumption: the root mean square of the scores' distances from their mean is at
            most this (3 allows chances of winning from 0.0025 to 0.9975), and coefficients times
            the largest value of their control are at most this.
        exact: how many contrasts at most are bounded exactly instead of by an ellipsoid.

    Example:
        >>> table = {"model_a": ["x", "x", "y"] * 40, "model_b": ["y", "z", "z"] * 40,
        ...          "winner": ["model_a", "model_a", "tie"] * 40}
        >>> board = leaderboard(table)
        >>> board.names[0], int(board.best_rank[0]), int(board.worst_rank[0])
        ('x', 1, 1)
    """
    check_probability("delta", delta)
    check_positive("spread", spread)
    check_count("exact", exact)
    if isinstance(controls, str):
        raise refuse("controls", "a list of columns", repr(controls))
    columns = Columns(left, right, winner, tuple(controls))
    if isinstance(frame, Battles):
        battles = frame
    elif isinstance(frame, str | os.PathLike):
        battles = read_battles(frame, columns)
    else:
        battles = battles_in(frame, columns)
    return _ranked(battles, delta, spread, exact)


def _ranked(battles: Battles, delta: float, spread: float, exact: int) -> Leaderboard:
    """The leaderboard of the largest group that battles connect."""
    K, C = len(battles.names), len(battles.controls)
    group = battles.groups()
    sizes = np.bincount(group)
    members = np.flatnonzero(group == sizes.argmax())
    others = tuple(
        tuple(battles.names[i] for i in np.flatnonzero(group == number))
        for number in np.argsort(-sizes, kind="stable")
        if number != sizes.argmax()
    )
    largest = np.abs(battles.rows.controls).max(0, initial=0.0)
    units = np.where(largest > 0.0, largest, 1.0)
    rows = battles.rows._replace(controls=battles.rows.controls / units)
    found = BattleSet(BattleLoss(rows, group), spread * math.sqrt(K + C), delta)
    own = np.eye(K + C)
    own[np.ix_(members, members)] -= 1.0 / len(members)
    own = own[np.concatenate([members, np.arange(K, K + C)])]
    both = np.concatenate([own, -own])
    few = len(both) <= exact
    ends = np.array([found.exact(c) for c in both]) if few else found.rough(both)
    upper, lower = ends[: len(own)], -ends[len(own) :]
    pairs = _pairs(found, members, exact - len(both) if few else 0)
    behind = pairs < 0.0  # i is behind j for certain
    scores, M = found.theta[members], len(members)
    order = np.argsort(-scores, kind="stable")
    square = np.ix_(order, order)
    coefficients = tuple(
        (name, *(float(v / units[j]) for v in (found.theta[K + j], lower[M + j], upper[M + j])))
        for j, name in enumerate(battles.controls)
    )
    return Leaderboard(
        tuple(battles.names[members[i]] for i in order),
        scores[order],
        lower[order],
        upper[order],
        (1 + behind.sum(1))[order],
        (M - behind.sum(0))[order],
        np.rint(battles.counts()).astype(np.int64)[members][order],
        -pairs.T[square],
        pairs[square],
        coefficients,  # type: ignore[arg-type]
        others,
        found.fit.inside,
        delta,
        spread,
    )


def _pairs(found: BattleSet, members: Ints, exact: int) -> Floats:
    """Upper bounds on ``s_i - s_j``, ``(M, M)``; exact ones where they may decide an order."""
    bound = found.rough_pairs()[np.ix_(members, members)]
    scores, M = found.theta[members], len(members)
    middle = scores[:, None] - scores[None, :]
    if exact >= M * (M - 1):
        i, j = np.nonzero(~np.eye(M, dtype=bool))
    else:
        hopeful = (bound >= 0.0) & (middle + HOPE * (bound - middle) < 0.0)
        i, j = np.nonzero(hopeful)
        first = np.argsort(bound[i, j], kind="stable")[:exact]
        i, j = i[first], j[first]
    for a, b in zip(i, j, strict=True):
        contrast = np.zeros(found.loss.dim)
        contrast[members[a]], contrast[members[b]] = 1.0, -1.0
        bound[a, b] = min(bound[a, b], found.exact(contrast))
    return bound
