"""One result for every solve, with a status for every batch element."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from torchglb.errors import SolverError
from torchglb.optim.numbers import numbers, wait_for_any


class Status(enum.IntEnum):
    """How a solve ended; each member carries a sentence for a human.

    Example:
        >>> import torchglb as glb
        >>> rows = glb.Rows([[1.0, 0.0], [0.6, 0.8]], [1.0, 0.0])
        >>> fit = glb.constrained_mle(glb.Bernoulli(), rows, glb.Ball(2, 3.0))
        >>> Status(int(fit.status)).name
        'CONVERGED'
    """

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

    Example:
        >>> import torch
        >>> import torchglb as glb
        >>> raise_unless_converged(torch.tensor([0, 0]), "the fit")
        >>> try:
        ...     raise_unless_converged(torch.tensor([0, int(glb.Status.MAX_STEPS)]), "the fit")
        ... except glb.SolverError as failed:
        ...     print(str(failed)[:18])
        the fit: MAX_STEPS
    """
    if not wait_for_any(numbers(status) != int(Status.CONVERGED)):
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

    Example:
        >>> import torch
        >>> def evaluate(theta):  # |theta - (2, 0)|^2/2
        ...     off = theta - torch.tensor([2.0, 0.0]).double()
        ...     return off.square().sum(-1) / 2, off, torch.eye(2).double()
        >>> from torchglb.optim import newton
        >>> start, S = torch.zeros(2).double(), torch.tensor(1.0).double()
        >>> result, _ = newton(evaluate, start, S, tol=1e-9)
        >>> bool(result.gap < 1e-8), result.status
        (True, tensor(0))
    """

    point: Tensor
    value: Tensor
    gap: Tensor
    status: Tensor
    num_steps: Tensor
