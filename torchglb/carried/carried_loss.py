"""The loss of N growing problems at fixed points, with its derivatives, brought forward."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchglb.backend import Floats, bound_once, entry
from torchglb.backend.dense import EPS
from torchglb.carried.kernels import (
    LONGEST,
    Carried,
    Workspace,
    add_columns,
    add_totals,
    carry_row,
    memory_size,
    row_powers,
    workspace,
)
from torchglb.carried.model import (
    CONSTANTS,
    ERROR,
    CarriedSums,
    Objectives,
    Polynomials,
    carried_of,
    expand_all,
)
from torchglb.carried.monomials import Monomials, monomials
from torchglb.carried.rounding import compensated, plain
from torchglb.carried.source import NO_FAMILY, RowSource
from torchglb.checks import check_tensors, refuse
from torchglb.domain import Ball
from torchglb.errors import SolverError
from torchglb.families import GLMFamily
from torchglb.families.base import largest_reward
from torchglb.families.compiled import CompiledFamily
from torchglb.families.row_terms import CHUNK, HIGHEST, SCRATCH


def choose_order(family: GLMFamily, dim: int, radius: float, largest: int) -> int:
    """The highest order q >= 2 with few derivatives whose remainder can be bounded.

    Args:
        family: the GLM family; orders beyond 2 need compiled derivatives.
        dim: d.
        radius: S.
        largest: derivatives of the highest order.
    """
    order = 2
    if family.compiled() is None or family.derivative_ratio(3, radius) == 0.0:
        return order  # a quadratic is its own Taylor polynomial
    while (
        order < HIGHEST
        and math.comb(dim + order, order + 1) <= largest
        and family.derivative_ratio(order + 2, radius) is not None
    ):
        order += 1
    return order


class CarriedLoss:
    """Sums of a family's derivatives at A points of each of N problems.

    What one row adds to the loss at a fixed point, and to its derivatives up to order q, is known
    when the row is: O(A d^q), and no pass. Near a point the loss is then known as well, by its
    Taylor polynomial with a certified remainder (:func:`torchglb.carried.taylor.remainder`).
    Everything is float64 and one array: a copy of an object is a copy of its sums.

    Args:
        family: the GLM family.
        domain: the ball, with a radius for all problems or for each.
        problems: N.
        points: A; at first all are the origin.
        order: q; 1 keeps loss, gradient and trace of the Hessian only.

    Attributes:
        memory: ``(N, size)``; :func:`torchglb.carried.kernels.carried_in` says what is where.
        table: the monomials of the sums.
        constants: S, C and R of every problem, ``(N,)`` records of dtype ``CONSTANTS``.

    Example:
        >>> import torchglb as glb
        >>> history = glb.History(dim=2)
        >>> carried = CarriedLoss(glb.Bernoulli(), glb.Ball(2, 3.0), 1, points=1, order=2)
        >>> history.append([1.0, 0.0], 1.0)
        >>> carried.catch_up(RowSource(glb.Bernoulli(), history))
        >>> carried.loss
        array([[0.69314718]])
    """

    def __init__(
        self, family: GLMFamily, domain: Ball, problems: int, points: int, order: int
    ) -> None:
        self.family, self.number = family, points
        self.table = monomials(domain.dim, order)
        self.memory = np.zeros((problems, memory_size(domain.dim, points, self.table.count)))
        like = torch.zeros((), dtype=torch.float64)
        known = {
            "radius": domain.radius_like(like),
            "ratio": domain.constant(lambda S: ratio_of(family, max(order, 2) + 1, S), like),
            "concordance": domain.constant(family.self_concordance, like),
        }
        reach = known["radius"] * known["concordance"]
        if not bool(torch.isfinite(2.0 * reach).all()):
            got = f"{family!r} with R_s = {float(known['concordance'].max()):g} (take a smaller S)"
            expected = (
                f"a family with a finite R_s on [-{domain.max_radius:g}, {domain.max_radius:g}]"
            )
            raise refuse("family", expected, got)
        self.constants = np.zeros(problems, CONSTANTS)
        for name, value in known.items():
            self.constants[name] = value.expand(_shape(domain, problems)).reshape(-1).numpy()

    def copy(self) -> CarriedLoss:
        """With sums of its own."""
        new = copy.copy(self)
        new.memory = self.memory.copy()
        return new

    # ---- reading -------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """d."""
        return self.table.dim

    def of(self, b: int) -> Carried:
        """The sums of one problem, by name: views."""
        return carried_of(self.arrays(), b)

    @property
    def points(self) -> Floats:
        """Where the loss is carried, ``(N, A, d)``: a copy."""
        return np.stack([carried.points.T for carried in self._all()])

    @property
    def loss(self) -> Floats:
        """Of the data at the points, ``(N, A)``: a copy."""
        return np.stack([carried.sums[0] for carried in self._all()])

    @property
    def gradient(self) -> Floats:
        """Of the data's loss, ``(N, A, d)``: a copy."""
        return np.stack([carried.sums[1 : 1 + self.dim].T for carried in self._all()])

    @property
    def rows(self) -> int:
        """How many rows are in the sums."""
        return int(self.memory[0, -1])

    @property
    def longest(self) -> Floats:
        """The length of the longest row of every problem, ``(N,)``: a copy."""
        return np.array([carried.totals[LONGEST] for carried in self._all()])

    def _all(self) -> list[Carried]:
        return [self.of(b) for b in range(len(self.memory))]

    # ---- rows ----------------------------------------------------------------------------

    def append(self, source: RowSource, x: Floats, y: Floats, w: Floats) -> None:
        """Adds rows to the sums at all points.

        Args:
            source: whose family it is.
            x: features, ``(N, k, d)``.
            y: weights times rewards, ``(N, k)``.
            w: weights, ``(N, k)``.
        """
        if source.compiled is not NO_FAMILY:
            x, y, w = (np.ascontiguousarray(given, np.float64) for given in (x, y, w))
            carry_rows(source.compiled, x, y, w, self.arrays())
            return
        new = self.arrays()._replace(memory=self.memory.copy())
        for b, s in np.ndindex(y.shape):
            row = x[b, s], float(y[b, s]), float(w[b, s])
            add_by_torch(source.family, *row, carried_of(new, b), self.table)
        self.memory[:] = new.memory  # all or nothing

    def catch_up(self, source: RowSource) -> None:
        """Adds the rows that the history has more; makes all sums anew where that cannot be."""
        missing = len(source.history) - self.rows
        if not missing:
            return
        last = None
        # more than there are distinct rows: a pass over those is cheaper
        if 0 < missing <= source.arrays().used and source.history.shards.is_whole:
            last = source.history.last_arrays(missing)
        if last is None:
            self.rebuild(source)
        else:
            self.append(source, *last)

    def rebuild(self, source: RowSource, points: Floats | None = None) -> None:
        """Makes all sums anew by passes: at other points ``(N, A, d)``, or where they are.

        What repairs sums that an interruption has left behind the history.
        """
        new = self.arrays()._replace(memory=self.memory.copy())
        work = workspace(self.dim, self.table.count)
        totals = row_totals(self.family, source)
        for b in range(len(totals)):
            carried = carried_of(new, b)
            carried.totals[:] = totals[b]
            for a in range(self.number):
                point = carried.points[:, a].copy() if points is None else points[b, a]
                trace = source.pass_at(b, point, self.table, work)
                self._put(carried, a, point, trace, work)
        self.memory[:] = new.memory  # all or nothing

    def move(self, source: RowSource, b: int, slot: int, point: Floats) -> None:
        """Puts one point of problem b somewhere else: a pass."""
        work = workspace(self.dim, self.table.count)
        trace = source.pass_at(b, point, self.table, work)
        self._put(self.of(b), slot, point, trace, work)

    @staticmethod
    def _put(carried: Carried, slot: int, point: Floats, trace: float, work: Workspace) -> None:
        carried.points[:, slot] = point
        carried.sums[:, slot], carried.rest[:, slot] = work.sums, work.rest
        carried.trace[slot] = trace

    # ---- near the points -----------------------------------------------------------------

    def arrays(self) -> CarriedSums:
        """What is carried, for compiled code."""
        return CarriedSums(self.memory, self.number, self.constants, self.table)

    def objectives(self, ridge: Floats, tilt: Floats) -> Objectives:
        """``F = L + (lambda/2)|theta|^2 - <tilt, theta>`` of every problem, for compiled code."""
        return Objectives(self.arrays(), ridge, tilt)

    def expand(
        self,
        theta: Floats,
        slot: int = 0,
        ridge: Floats | None = None,
        tilt: Floats | None = None,
    ) -> Polynomials:
        """F at ``theta (N, d)`` by the polynomial of a point, with what is certain of it.

        Args:
            theta: one place for each problem.
            slot: which point.
            ridge: lambda, ``(N,)``; 0 if not given.
            tilt: ``(N, d)``; 0 if not given.
        """
        N, d = theta.shape
        found = Polynomials(np.empty(N), np.empty((N, d)), np.empty((N, d, d)), np.empty(N, ERROR))
        ridge = np.zeros(N) if ridge is None else ridge
        tilt = np.zeros((N, d)) if tilt is None else tilt
        expand_all(self.objectives(ridge, tilt), slot, theta, found)
        return found

    # ---- checking ------------------------------------------------------------------------

    def check(self, source: RowSource, b: int, slot: int = 0) -> None:
        """Compares the sums of one point with a pass there.

        Raises:
            SolverError: if they differ by more than both may have lost by rounding. Loss and
                gradient: see :func:`torchglb.carried.model.error_at`. A sum of order k >= 2 has
                terms of at most ``C_k w m'' |x|^2/g``, for rows in the unit ball.
        """
        carried, work = self.of(b), workspace(self.dim, self.table.count)
        point = carried.points[:, slot].copy()
        trace = source.pass_at(b, point, self.table, work)
        S, concordance = self.constants["radius"][b], self.constants["concordance"][b]
        _, magnitude, rows = carried.totals
        sums, d = carried.sums[:, slot], self.dim
        loss_size = abs(work.sums[0]) + 2.0 * S * magnitude
        slope_size = magnitude + trace * S
        allowed = [(1, compensated(d) * loss_size), (d, compensated(d) * slope_size)]
        for order in range(2, self.table.order + 1):
            ratio = 1.0 if order == 2 else max(ratio_of(self.family, order, float(S)), 1.0)
            count = math.comb(d + order - 1, order)
            factor = plain(d, rows) * ratio * (1.0 + concordance)
            allowed.append((count, factor * trace if factor < math.inf else math.inf))
        limits = np.concatenate([np.full(count, size) for count, size in allowed])
        off = np.abs(sums - work.sums)
        if not (off <= 4.0 * EPS * limits + 1e-300).all():
            worst = int((off / np.maximum(limits, 1e-300)).argmax())
            raise SolverError(
                f"carried sums of problem {b} at point {slot} are off: entry {worst} is "
                f"{sums[worst]}, a pass gives {work.sums[worst]}"
            )

    def checked_pass(
        self, source: RowSource, b: int, point: Floats, table: Monomials, work: Workspace
    ) -> float:
        """A pass at a point; the loss there must be what the polynomial of slot 0 promises.

        For families that declare their constants themselves: a promise that is broken means that
        they are too small, and every bound may be wrong.

        Returns:
            The trace of the Hessian; the sums are in ``work``.
        """
        trace = source.pass_at(b, point, table, work)
        if self.table.order >= 2 and self.rows:
            theta = np.broadcast_to(point, (len(self.memory), self.dim))
            found = self.expand(theta)
            promised, error = found.value[b], found.errors["value"][b]
            if abs(work.sums[0] - promised) > error:
                raise SolverError(
                    f"{type(self.family).__name__}: its self_concordance or derivative_ratio is "
                    f"too small: the loss is {work.sums[0]:.6g} where they allow only "
                    f"{promised:.6g} +- {error:.3g}; no bound can be certified with them"
                )
        return trace

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to continue bit by bit."""
        return {"sums": torch.from_numpy(self.memory.copy())}

    def check_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Refuses a state of another kind."""
        check_tensors(name, state, {"sums": torch.from_numpy(self.memory)})
        rows = state["sums"][:, -1]
        if not bool(((rows == rows[0]) & (rows >= 0) & (rows == rows.floor())).all()):
            expected = "in its last column how many rows the sums have"
            raise refuse(f"{name}['sums']", expected, rows.tolist())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, of the same family and ball."""
        self.check_state("state", state)
        self.memory[:] = state["sums"].detach().numpy()


def _shape(domain: Ball, problems: int) -> tuple[int, ...]:
    """The batch shape that a ball's radii have to take."""
    shape = tuple(domain.radius.shape) if isinstance(domain.radius, Tensor) else ()
    if math.prod(shape) not in (1, problems):
        raise refuse("domain", f"one radius, or {problems}", f"{math.prod(shape)}")
    return shape if math.prod(shape) == problems else (problems,)


def ratio_of(family: GLMFamily, order: int, radius: float) -> float:
    """C with ``|m^(order)| <= C m''``; infinite where it is not known."""
    known = family.derivative_ratio(order, radius)
    return math.inf if known is None else known


def row_totals(family: GLMFamily, source: RowSource) -> Floats:
    """The totals of every problem, ``(N, 3)``; see :func:`torchglb.carried.kernels.add_totals`."""
    rows = source.arrays()
    X, w, y = (np.asarray(t[..., : rows.used], np.float64) for t in rows[:3])
    lengths = np.sqrt((X * X).sum(1))
    magnitude = (lengths * np.maximum(np.abs(y), w * largest_reward(family))).sum(-1)
    longest = lengths.max(-1, initial=0.0)
    both = torch.from_numpy(np.stack([longest, magnitude / family.dispersion]))
    shards = source.history.shards
    if not shards.is_whole:
        both = torch.stack([shards.maximum(both[0]), shards.sum(both[1])[0]])
    count = np.full(len(magnitude), float(len(source.history)))
    return np.column_stack([both[0].numpy(), both[1].numpy(), count])


def add_by_torch(
    family: GLMFamily, x: Floats, y: float, w: float, carried: Carried, table: Monomials
) -> None:
    """Adds a row of a family whose derivatives are not compiled, ``x (d,)``, to sums."""
    z = torch.from_numpy(x @ carried.points)
    r = torch.full_like(z, y / w if w > 0 else 0.0)
    terms = w * torch.stack([*family.loss_terms(z, r)]).numpy()
    carry_terms(x, w, y, terms, largest_reward(family), family.dispersion, carried, table)


@bound_once
@entry
def carry_rows(family: CompiledFamily, x: Floats, y: Floats, w: Floats, sums: CarriedSums) -> None:
    """Adds k rows of every problem to its sums: O(A k d^q)."""
    table, scratch, monomial = sums.table, np.zeros(SCRATCH), np.empty(sums.table.count)
    for b in range(x.shape[0]):
        carried = carried_of(sums, b)
        for s in range(x.shape[1]):
            carry_row(family, x[b, s], w[b, s], y[b, s], carried, table, scratch, monomial)


@entry
def carry_terms(
    x: Floats,
    w: float,
    y: float,
    terms: Floats,
    largest: float,
    dispersion: float,
    carried: Carried,
    table: Monomials,
) -> None:
    """Adds one row whose loss, slope and curvature at all points, ``(3, A)``, are known."""
    monomial, block = np.empty(table.count), np.zeros(3 * CHUNK)
    row_powers(x, table, monomial)
    for start in range(0, terms.shape[1], CHUNK):
        count = min(CHUNK, terms.shape[1] - start)
        for k in range(3):
            block[k * CHUNK : k * CHUNK + count] = terms[k, start : start + count]
        add_columns(block, start, count, monomial, carried, table)
    add_totals(x, w, y, largest, 1.0 / dispersion, carried)
