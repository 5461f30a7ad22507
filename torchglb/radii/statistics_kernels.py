"""What a row adds to the running sums, compiled: those of :mod:`torchglb.radii.statistics`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchglb.backend import Floats, entry, inlined, kernel
from torchglb.backend.dense import length
from torchglb.families.compiled import EXPONENTIAL, LOGISTIC, SQUARE, CompiledFamily
from torchglb.families.row_terms import CHUNK, FIRST, SCRATCH, SECOND, TERMS, W, Y, row_terms

NUMBER, WEIGHT, LONGEST, EXTREME = 0, 1, 2, 3
BALL_LOSS, REWARD_LENGTH = 0, 1


class CompiledStatistics(NamedTuple):
    """:class:`torchglb.radii.RowStatistics` of one problem, in its own memory, field by field."""

    sums: Floats  # at NUMBER, WEIGHT, LONGEST and EXTREME
    middle: Floats
    width: Floats
    width_gram: Floats
    residual: Floats
    slope_gram: Floats
    rest: Floats  # at BALL_LOSS and REWARD_LENGTH


@inlined
def statistics_in(memory: Floats, dim: int) -> CompiledStatistics:
    """The sums that lie in memory ``(size,)``."""
    a = 4 + dim
    b = a + 1 + dim * dim
    c = b + dim
    e = c + dim * dim
    return CompiledStatistics(
        memory[:4],
        memory[4:a],
        memory[a : a + 1],
        memory[a + 1 : b].reshape(dim, dim),
        memory[b:c],
        memory[c:e].reshape(dim, dim),
        memory[e:],
    )


class CompiledRule(NamedTuple):
    """:class:`torchglb.radii.ball_mean.BallRule` of one problem, and the largest m'' there."""

    nodes: Floats
    weights: Floats
    error: float
    top: float


@inlined
def rule_in(numbers: Floats) -> CompiledRule:
    """From :meth:`torchglb.radii.Problem.compiled_rules` of a problem."""
    nodes = (numbers.shape[0] - 2) // 2
    error, top = numbers[2 * nodes], numbers[2 * nodes + 1]
    return CompiledRule(numbers[:nodes], numbers[nodes : 2 * nodes], error, top)


@kernel
def ball_mean(family: CompiledFamily, rule: CompiledRule, a: float, scratch: Floats) -> float:
    """At least ``E m(a U)``, U a coordinate of a uniform point of the ball."""
    half, total = CHUNK // 2, 0.0
    for start in range(0, rule.nodes.shape[0], half):
        count = min(half, rule.nodes.shape[0] - start)
        for i in range(2 * count):
            node = rule.nodes[start + i % count]
            scratch[i] = a * node if i < count else -a * node
            scratch[W + i], scratch[Y + i] = 1.0, 0.0
        row_terms(family, scratch, 2 * count, 2)
        for i in range(count):
            even = 0.5 * (scratch[TERMS + i] + scratch[TERMS + count + i])
            total += even * rule.weights[start + i]
    return total + rule.error


@inlined
def undispersed(family: CompiledFamily) -> CompiledFamily:
    """The same family with g = 1."""
    f = family
    return CompiledFamily(f.code, f.trials, 1.0, f.low, f.high, f.whole, f.largest)


@kernel
def add_statistics(
    family: CompiledFamily,
    rule: CompiledRule,
    S: float,
    x: Floats,
    r: float,
    w: float,
    found: CompiledStatistics,
    scratch: Floats,
) -> None:
    """Adds one row. ``family`` is the one of dispersion 1."""
    d, norm = x.shape[0], length(x)
    a = S * norm
    ball_loss = ball_mean(family, rule, a, scratch)
    for i in range(3):
        scratch[W + i], scratch[Y + i] = 1.0, 0.0
    scratch[0], scratch[1], scratch[2] = a, -a, 0.0
    row_terms(family, scratch, 3, 2)
    high, low, centre = scratch[FIRST], scratch[FIRST + 1], scratch[FIRST + 2]
    half = 0.5 * (high - low)
    slope = rule.top
    if family.code == SQUARE:
        slope = 1.0
    elif family.code == LOGISTIC:
        slope = 0.25 * family.trials
    elif family.code == EXPONENTIAL:
        slope = scratch[SECOND]
    if w > 0.0:
        found.sums[NUMBER] += 1.0
        found.sums[LONGEST] = max(found.sums[LONGEST], norm)
    found.sums[WEIGHT] += w
    found.sums[EXTREME] += w * norm * max(abs(r - low), abs(r - high))
    found.width[0] += w * half
    found.rest[BALL_LOSS] += w * ball_loss
    found.rest[REWARD_LENGTH] += w * abs(r) * norm
    for i in range(d):
        found.middle[i] += w * (0.5 * (high + low) - r) * x[i]
        found.residual[i] += w * (centre - r) * x[i]
        for j in range(d):
            found.width_gram[i, j] += w * half * x[i] * x[j]
            found.slope_gram[i, j] += w * slope * x[i] * x[j]


@entry
def carry_statistics(
    family: CompiledFamily,
    x: Floats,
    r: Floats,
    w: Floats,
    S: Floats,
    rules: Floats,
    memory: Floats,
) -> None:
    """Adds k rows of every problem, ``x (N, k, d)``, to its statistics ``(N, size)``.

    ``rules`` as for :func:`rule_in`.
    """
    scratch, d, plain = np.zeros(SCRATCH), x.shape[2], undispersed(family)
    for b in range(x.shape[0]):
        found, rule = statistics_in(memory[b], d), rule_in(rules[b])
        for s in range(x.shape[1]):
            add_statistics(plain, rule, S[b], x[b, s], r[b, s], w[b, s], found, scratch)
