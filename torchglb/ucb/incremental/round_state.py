"""What one round of one problem reads and writes; compiled."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torchglb.backend import Floats, Ints, inlined, record_type
from torchglb.backend.tridiagonal import Tridiagonal, tridiagonal_memory
from torchglb.carried.kernels import Workspace, workspace
from torchglb.carried.minimum import SearchVectors
from torchglb.carried.model import Dense, Model, Objective, Quadratic, dense
from torchglb.ucb.kernels import STEP_ROWS

Singles = NDArray[np.float32]

#: arms whose products with all anchors are formed together
BLOCK = 16
#: what a round answers: it is decided, or waits for a pass for the minimum, an anchor, a minorant;
#: or, to itself, that the level has to be known better first
DECIDED, PASS_FOR_MINIMUM, PASS_FOR_ANCHOR, PASS_FOR_MINORANT, SHARPEN = 0, 1, 2, 3, 4
#: where a round stands
MINIMUM, SCAN, LOOKS = 0, 1, 2
#: how a round has ended
CERTAIN, UNDECIDED, NO_CENTER = 0, 1, 2


class RoundState(Protocol):
    """Where a round stands: a record, so that it can stop for a pass and go on."""

    phase: int  # MINIMUM, SCAN or LOOKS
    ending: int  # CERTAIN, UNDECIDED or NO_CENTER
    leader: int  # the arm with the largest lower bound
    looks: int  # so far
    passes: int  # for arms, so far
    arm: int  # whose pass is awaited
    exhausted: int  # whether arithmetic allows no better knowledge of the level
    number: int  # of this round
    awaited: int  # the pass that was asked for last, or 0; when the round goes on it has been made
    supposed: int  # whether the centre counts as feasible although rounding hides that
    reduced: int  # whether memory.minimum_form is that of this round
    with_minorant: int  # whether the minorant has bounded the arms, or is not to
    minorant_passes: int  # for its matrix, so far
    height: float  # B itself, or how far it is above the minimum
    tolerance: float  # to which the minimum is to be found
    level: float  # B at most
    low: float  # B at least
    center_loss: float  # F at the centre, at most


ROUND = record_type(RoundState)


class Settings(NamedTuple):
    """What is asked of a round.

    Attributes:
        relative: whether levels are given by how far they are above the minimum.
        level_tol: the minimum is certified to this if need be.
        tie: arms whose values agree to ``tie (1 + |h|)`` count as equal.
        value_tol: the winner's own gap is closed to this too; infinite if that is not asked for.
        close_all: close the gaps of all arms to ``value_tol``, whoever wins.
        max_steps: looks with a pass before a round is given up as undecided.
    """

    relative: bool
    level_tol: float
    tie: float
    value_tol: float
    close_all: bool
    max_steps: int


class Level(NamedTuple):
    """The set of this round, ``{|theta| <= S, F(theta) <= B}``; of B an interval is known."""

    high: float  # B is at most this: cuts are made with it
    low: float  # B is at least this: feasible points are found with it
    center: Floats  # a point of the set, (d,)
    center_loss: float  # F there, at most
    radius: float  # S
    magnitude: float  # of the rows and the tilt, which bounds rounding; see add_totals
    quadratic: Quadratic  # what is added to the loss of the data


class Arms(NamedTuple):
    """The arms of one round, and what is known of them."""

    units: Floats  # (K, d), unit vectors, or zeros
    lengths: Floats  # (K,)
    upper: Floats  # (K,), bounds on h from above
    lower: Floats  # (K,), the same from below
    cut: Ints  # (K,), the anchor behind upper
    feasible: Ints  # (K,), the anchor whose feasible point is behind lower
    multiplier: Floats  # (K,), of the level, dh/dB, as the cut has it


class Cuts(NamedTuple):
    """Memory for the cuts and feasible points of A anchors."""

    offset: Floats  # (A,); the set obeys <grad F, theta> <= offset
    inverse_norm: Floats  # (A,), 1/|grad F|
    share: Floats  # (A,), of the segment from the centre to the anchor that is feasible
    vectors: Singles  # (d, 2 A), the unit normals, then the feasible points
    distance: Singles  # (A,), of the plane from the origin, with a sign
    disc: Singles  # (A,), the radius of the disc in which the plane meets the ball
    ratio: Singles  # (A,), of these two
    products: Singles  # (BLOCK, 2 A), of arms with all vectors
    gain: Singles  # (A,), by how much each cut lowers the bound of an arm


@inlined
def cuts_memory(dim: int, anchors: int) -> Cuts:
    """For so many anchors."""
    return Cuts(
        np.empty(anchors),
        np.empty(anchors),
        np.empty(anchors),
        np.empty((dim, 2 * anchors), np.float32),
        np.empty(anchors, np.float32),
        np.empty(anchors, np.float32),
        np.empty(anchors, np.float32),
        np.empty((BLOCK, 2 * anchors), np.float32),
        np.empty(anchors, np.float32),
    )


class AnchorUse(NamedTuple):
    """How the anchors were of use.

    Attributes:
        last: ``(A,)``, the last round in which the anchor bounded an arm.
        shift: ``(d, A)``, from the anchor to the maximiser that its polynomial found last.
        excess: ``(A,)``, how much the loss may be above the polynomial there.
        free_looks: ``(1,)``, looks without a pass since the last one with a pass.
    """

    last: Floats
    excess: Floats
    shift: Floats
    free_looks: Floats


@inlined
def anchor_use_in(memory: Floats, dim: int, anchors: int) -> AnchorUse:
    """In memory ``((d + 2) A + 1,)``."""
    end = (dim + 2) * anchors
    shift = memory[2 * anchors : end].reshape(dim, anchors)
    return AnchorUse(memory[:anchors], memory[anchors : 2 * anchors], shift, memory[end:])


class Minorant(NamedTuple):
    """The quadratic below the loss of one problem, in its memory."""

    point: Floats  # c, (d,)
    matrix: Floats  # the upper triangle of M, row by row, (d (d + 1)/2,)
    state: Floats  # (5,), REACH to LAST_NEEDED of minorant.py; (0,) where there is never one


class CarriedProblem(NamedTuple):
    """One problem: what is carried of it, and its constants."""

    anchors: Objective  # F at the anchors
    use: AnchorUse  # of the anchors
    minimum: Model  # F near its minimum
    vectors: SearchVectors  # of the search for it
    minorant: Minorant
    rows: int  # of a pass


class Memory(NamedTuple):
    """For one problem at a time: its round, its passes, its arms."""

    dense: Dense
    matrix: Floats  # of the equations of a Newton step, (d + 2, d + 2)
    right: Floats  # and their right-hand side, (d + 2,)
    cuts: Cuts
    minimum_form: Tridiagonal  # the Hessian at the carried minimum
    form: Tridiagonal  # that of another model
    step: Floats  # (STEP_ROWS, d)
    trial: Floats  # (d,)
    start: Floats  # (d,)
    gradient: Floats  # (d,)
    normal: Floats  # (d,)
    residual: Floats  # (d,)
    chosen: Ints  # (BLOCK + 1,), arms, and last how many
    anchor_pass: Workspace
    minimum_pass: Workspace  # and that of a minorant
    arm_anchors: Ints  # (2 K,), see arms_of
    arm_numbers: Floats  # (K (d + 2),)


@inlined
def round_memory(dim: int, anchors: int, count: int, minimum_count: int, arms: int) -> Memory:
    """For problems of this size."""
    return Memory(
        dense(dim, max(count, minimum_count)),
        np.zeros((dim + 2, dim + 2)),
        np.zeros(dim + 2),
        cuts_memory(dim, anchors),
        tridiagonal_memory(dim),
        tridiagonal_memory(dim),
        np.empty((STEP_ROWS, dim)),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(dim),
        np.empty(BLOCK + 1, np.int64),
        workspace(dim, count),
        workspace(dim, minimum_count),
        np.empty(2 * arms, np.int64),
        np.empty(arms * (dim + 2)),
    )


class Round(NamedTuple):
    """All that a round reads and writes, beside its state: a record in a tuple would be a copy."""

    problem: CarriedProblem
    arms: Arms
    level: Level
    settings: Settings
    memory: Memory
