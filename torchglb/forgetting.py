"""Forgetting: old rows count less, or not at all, so that a changing theta* can be followed.

Rows get weights ``gamma^age`` or leave after n rounds. For any single time these are weights in
[0, 1] that were fixed beforehand, so that every radius of the library holds at that time; but the
weights of the next time are others, and the statements of all times are no single martingale.
Validity at all times is bought time by time: the set after t - 1 rows is built with
``delta/(t (t + 1))``, which adds up to delta. The statement is about a theta* that did not change
within the rows that count: a theta* that drifts adds a bias that no likelihood sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.backend import Reals
from torchglb.checks import check_count, check_entries, check_probability, check_tensors, refuse
from torchglb.domain import Ball
from torchglb.families import GLMFamily
from torchglb.likelihood import NegativeLogLikelihood
from torchglb.rows.buffers import Rows
from torchglb.rows.history import History
from torchglb.rows.sums import Expansion

#: rows whose weight has fallen below this are let go: together they would hold this share of what
#: is known
FAINT = 1e-3
#: the anchor moves, and its sums are computed anew by a pass, after so many rows at least and at
#: most: soon while much is learnt, and always before rounding accumulates
SOON, LATE = 16, 1024


@dataclass(frozen=True)
class Discount:
    """A row of age a has the weight ``gamma^a``; the newest has age 0.

    Args:
        gamma: in (0, 1). About 1/(1 - gamma) rows count.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> glb.ConfidenceSequence(*given, forgetting=Discount(0.99)).forgetting
        Discount(gamma=0.99)
    """

    gamma: float

    def __post_init__(self) -> None:
        check_probability("gamma", self.gamma)

    @property
    def memory(self) -> int:
        """How many rows are kept: the weights of all others are below 1e-3, and set to 0."""
        return max(1, math.ceil(math.log(FAINT) / math.log(self.gamma)))

    def weights(self, age: Tensor) -> Tensor:
        """Of rows of some age, which is below the memory."""
        return torch.pow(self.gamma, age)


@dataclass(frozen=True)
class Window:
    """The last n rows count, all others do not.

    Args:
        n: at least 1.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Bernoulli(), glb.Ball(2, 3.0), 0.05)
        >>> glb.ConfidenceSequence(*given, forgetting=Window(200)).forgetting
        Window(n=200)
    """

    n: int

    def __post_init__(self) -> None:
        check_count("n", self.n, least=1)

    @property
    def memory(self) -> int:
        """n."""
        return self.n

    def weights(self, age: Tensor) -> Tensor:
        """All 1."""
        return torch.ones_like(age)


Forgetting = Discount | Window
#: the same, or a table of a configuration such as {"window": 200}
ForgettingGiven = Forgetting | Mapping[str, Any]


def as_forgetting(given: object) -> Forgetting | None:
    """What is forgotten, as an object or as a table of a configuration; None for nothing.

    Example:
        >>> as_forgetting({"discount": 0.99})
        Discount(gamma=0.99)
    """
    if given is None or isinstance(given, Discount | Window):
        return given
    if isinstance(given, Mapping) and list(given) == ["discount"]:
        return Discount(given["discount"])
    if isinstance(given, Mapping) and list(given) == ["window"]:
        return Window(given["window"])
    expected = "Discount(gamma), Window(n), {'discount': gamma} or {'window': n}"
    raise refuse("forgetting", expected, repr(given))


class _Anchored(NamedTuple):
    """The loss at an anchor, carried from row to row."""

    anchor: Tensor  # (*B, d)
    sums: Expansion  # the weighted loss there and its derivatives
    since: int  # rows since they were computed by a pass


class ForgettingHistory(History):
    """A history whose rows fade: what is read are the rows that count, with the weights of now.

    ``len`` counts all rows that ever came. The loss at an anchor is carried forward: scaled by
    gamma, new rows added, rows that leave subtracted; a pass moves the anchor and computes the sums
    anew before rounding accumulates. Fits start with a Newton step from there.

    Args:
        forgetting: ``Discount(gamma)`` or ``Window(n)``.
        family: the GLM family.
        domain: the ball.
        batch_shape: ``*B``.
        validate: look at values.
        dtype: float64 or float32.
        device: where the rows live.

    Example:
        >>> import torchglb as glb
        >>> history = ForgettingHistory(Discount(0.5), glb.Bernoulli(), glb.Ball(1, 2.0))
        >>> history.append([[1.0], [1.0], [1.0]], [1.0, 0.0, 1.0])
        >>> history.w.tolist()
        [0.25, 0.5, 1.0]
    """

    family: GLMFamily

    def __init__(
        self,
        forgetting: Forgetting,
        family: GLMFamily,
        domain: Ball,
        batch_shape: tuple[int, ...] = (),
        *,
        validate: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            domain.dim, batch_shape, family=family, validate=validate, dtype=dtype, device=device
        )
        if not self.is_whole:
            raise refuse("forgetting", "None for a history that is sharded", forgetting)
        self.forgetting, self.domain = forgetting, domain
        zero = self._held.X.new_zeros((*self.batch_shape, self.dim))
        nothing = Expansion(
            zero[..., 0].clone(), zero.clone(), zero[..., None] * zero[..., None, :]
        )
        self._carried = _Anchored(zero, nothing, 0)

    # ---- reading -------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """How many rows count."""
        return min(len(self), self.forgetting.memory)

    def view(self) -> Rows:
        """The rows that count, the oldest first, with their weights; to be read only."""
        rows = self._last(self.kept)
        if isinstance(self.forgetting, Window):
            return rows
        age = torch.arange(self.kept - 1, -1, -1, dtype=self.dtype, device=self.device)
        fading = self.forgetting.weights(age).expand(rows.r.shape)
        return rows._replace(w=fading if rows.w is None else rows.w * fading)

    def _last(self, count: int) -> Rows:
        """The last rows with the weights that they came with."""
        rows = super().view()
        return _part(rows, rows.X.shape[-2] - count, None)

    def _tight(self) -> Rows:
        return self.view()

    @property
    def w(self) -> Tensor:
        """Weights ``(*B, m)`` of the rows that count."""
        rows = self.view()
        return torch.ones_like(rows.r) if rows.w is None else rows.w.clone()

    def arrays(self) -> tuple[Reals, Reals, Reals, int]:
        """Refused: what compiled code carries on never forgets."""
        raise refuse("history", "one that forgets nothing", self.forgetting)

    # ---- the carried loss ----------------------------------------------------------------

    @property
    def anchor(self) -> Tensor:
        """Where the loss is carried, ``(*B, d)``."""
        return self._carried.anchor

    def carried(self) -> Expansion:
        """The weighted loss at the anchor and its derivatives, as carried."""
        return self._carried.sums

    @torch.no_grad()
    def start(self) -> Tensor:
        """A Newton step from the carried sums, drawn into the ball; the anchor where that fails."""
        anchor, sums, _ = self._carried
        eye = torch.eye(self.dim, dtype=self.dtype, device=self.device)
        S = self.domain.radius_like(anchor).expand(self.batch_shape)
        factor, failed = torch.linalg.cholesky_ex(sums.hessian + eye / S.square()[..., None, None])
        step = torch.cholesky_solve(sums.gradient[..., None], factor)[..., 0]
        theta = anchor - torch.where((failed == 0)[..., None], step, 0.0)
        theta = torch.where(torch.isfinite(theta).all(-1, keepdim=True), theta, anchor)
        return self.domain.project(theta)

    def _expand(self, rows: Rows, w: Tensor) -> Expansion:
        """At the anchor, of rows with weights."""
        X, r, own = _detached(rows)
        w = w.expand(r.shape) if own is None else own * w
        return NegativeLogLikelihood(self.family, X, r, w).expand(self._carried.anchor)

    # ---- writing -------------------------------------------------------------------------

    def append(self, x: ArrayLike, r: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Adds one row, ``x (*B, d)``, or k in their order, ``x (*B, k, d)``.

        Raises:
            InputError: on any argument that does not fit; the history is then unchanged.
        """
        mark, before, kept = self.mark(), len(self), self.kept
        try:
            super().append(x, r, weight)
            with torch.no_grad():
                self._carry(len(self) - before, kept)
        except BaseException:
            self.reset(mark)
            raise

    def _carry(self, new: int, kept: int) -> None:
        """The sums with the new rows and without those that leave, of which there were ``kept``."""
        anchor, sums, since = self._carried
        memory = self.forgetting.memory
        if new >= memory:  # none of the old ones is left
            sums = self._pass(anchor)
        else:
            rows = self._last(kept + new)
            age = torch.arange(kept + new - 1, -1, -1, dtype=self.dtype, device=self.device)
            weights, leaving = self.forgetting.weights(age), max(kept + new - memory, 0)
            scale = float(self.forgetting.weights(torch.tensor(float(new), dtype=torch.float64)))
            sums = _combined(sums, scale, self._expand(_part(rows, kept, None), weights[kept:]), 1)
            if leaving:
                gone = self._expand(_part(rows, 0, leaving), weights[:leaving])
                sums = _combined(sums, 1.0, gone, -1)
        self._carried = _Anchored(anchor, sums, since + new)
        if since + new >= min(max(len(self) - since - new, SOON), LATE):
            anchor = self.start()
            self._carried = _Anchored(anchor, self._pass(anchor), 0)
        self._drop()

    def _pass(self, anchor: Tensor) -> Expansion:
        return NegativeLogLikelihood(self.family, *_detached(self.view())).expand(anchor)

    def _drop(self) -> None:
        """Lets go of rows that do not count, once they are most of what is held."""
        held, memory = self._held, self.forgetting.memory
        if held.used > max(2 * memory, 64):
            last = slice(held.used - memory, held.used)
            X = held.X[..., last, :].mT.contiguous().mT
            self._held = held._replace(
                X=X, w=held.w[..., last].clone(), y=held.y[..., last].clone(), used=memory
            )

    def mark(self) -> Any:  # noqa: D102
        return super().mark(), self._carried

    def reset(self, mark: Any) -> None:  # noqa: D102
        super().reset(mark[0])
        self._carried = mark[1]

    # ---- saving --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit by bit."""
        anchor, sums, since = self._carried
        mine = {"anchor": anchor.clone(), "since": since, "sums": [t.clone() for t in sums]}
        return super().state_dict() | mine

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another kind."""
        check_entries("state", state, self.state_dict())
        check_tensors("state", state, {"anchor": self._carried.anchor})
        names = Expansion._fields
        parts = dict(zip(names, state["sums"], strict=True))
        check_tensors("state['sums']", parts, self._carried.sums._asdict())
        since = check_count("state['since']", state["since"])
        super().load_state_dict(state)
        sums = Expansion(*(parts[name].clone() for name in names))
        self._carried = _Anchored(state["anchor"].clone(), sums, since)


def _part(rows: Rows, first: int, last: int | None) -> Rows:
    X, r, w = rows
    w = None if w is None else w[..., first:last]
    return Rows(X[..., first:last, :], r[..., first:last], w)


def _detached(rows: Rows) -> Rows:
    return Rows(*(None if part is None else part.detach() for part in rows))  # type: ignore[arg-type]


def _combined(first: Expansion, scale: float, second: Expansion, weight: float) -> Expansion:
    pairs = zip(first, second, strict=True)
    return Expansion(*(scale * one + weight * other for one, other in pairs))
