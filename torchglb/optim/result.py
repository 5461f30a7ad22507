"""One result for every solve, with a status for every batch element."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.errors import SolverError
from torchglb.optim.numbers import anywhere, numbers


class Status(enum.IntEnum):
    """How a solve ended; each member carries a sentence for a human."""

    CONVERGED = 0
    MAX_STEPS = 1
    NONFINITE = 2
    INFEASIBLE = 3
    INACCURATE = 4

    @property
    def sentence(self) -> str:
        """What happened, in words."""
        return _SENTENCES[self]


_SENTENCES = {
    Status.CONVERGED: "the tolerance was reached",
    Status.MAX_STEPS: "the step limit was reached before the tolerance",
    Status.NONFINITE: "a NaN or an infinity appeared",
    Status.INFEASIBLE: "the constraints admit no point",
    Status.INACCURATE: "progress stopped at the limit of the arithmetic, short of the tolerance",
}


def raise_unless_converged(status: Tensor, what: str) -> None:
    """Raises :class:`SolverError` that names the elements which did not converge.

    Args:
        status: ``(*B)`` of :class:`Status` values.
        what: the solve, for the message.
    """
    if not anywhere(numbers(status) != int(Status.CONVERGED)):
        return
    lines = []
    for member in Status:
        where = torch.nonzero(status == member).tolist()
        if member is Status.CONVERGED or not where:
            continue
        named = ", ".join(str(tuple(w)) for w in where[:8]) + (", ..." if len(where) > 8 else "")
        place = f"batch elements {named}" if status.ndim else "the problem"
        lines.append(f"{member.name} ({member.sentence}): {place}")
    raise SolverError(
        f"{what}: " + "; ".join(lines) + ". Pass throw=False to get statuses instead."
    )


@dataclass(frozen=True)
class SolveResult:
    """Where a batched minimisation ended.

    Attributes:
        point: ``(*B, d)``.
        value: ``(*B)``, the objective there.
        gap: ``(*B)``, a certified bound on the suboptimality of ``value``.
        status: ``(*B)``, of :class:`Status`.
        num_steps: ``(*B)``, evaluations until this element stopped.
    """

    point: Tensor
    value: Tensor
    gap: Tensor
    status: Tensor
    num_steps: Tensor
