"""The G-optimal design: weights on the arms that make the worst-known arm known best.

With ``V(pi) = sum_k pi_k x_k x_k'`` it minimises ``max_k |x_k|^2`` in V(pi)^-1. By the theorem of
Kiefer and Wolfowitz the minimum is the rank r of the arms (d, if they span the space), and the same
pi maximises ``log det V(pi)``, a concave function: Frank-Wolfe, whose linear problem picks one arm,
with the exact step (Fedorov) and steps away from the support (Atwood), which make the convergence
linear.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.arrays import wait_for_all
from torchglb.checks import as_floats, check_positive, check_shape, refuse
from torchglb.errors import SolverError


class OptimalDesign(NamedTuple):
    """Weights pi on the arms.

    Attributes:
        weights: pi, ``(*B, K)``.
        worst: the largest ``|x|^2`` in V(pi)^-1, ``(*B)``.
        rank: of the arms, ``(*B)``.
    """

    weights: Tensor
    worst: Tensor
    rank: Tensor


def g_optimal(arms: ArrayLike, eps: float = 0.01, max_steps: int = 10_000) -> OptimalDesign:
    """The G-optimal design of ``arms (*B, K, d)``, to ``worst <= rank (1 + eps)``.

    Arms that do not span the space are taken in their span; zero arms get no weight unless all
    are zero.

    Raises:
        SolverError: if the step limit comes first.

    Example:
        >>> g_optimal(torch.eye(2, dtype=torch.float64)).weights
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    arms = as_floats("arms", arms)
    if arms.ndim < 2 or arms.shape[-2] == 0:
        check_shape("arms", arms, ("*B", "K >= 1", "d"))
    check_positive("eps", eps)
    if max_steps < 1:
        raise refuse("max_steps", "an integer of at least 1", max_steps)
    K = arms.shape[-2]
    weights = torch.full(arms.shape[:-1], 1.0 / K, dtype=arms.dtype, device=arms.device)
    rows, free, rank = _whitened(arms)
    worst = torch.zeros_like(rank)
    done = torch.zeros_like(rank, dtype=torch.bool)
    for _ in range(max_steps):
        information = (rows.mT * weights[..., None, :]) @ rows + free
        spread = (torch.cholesky_solve(rows.mT, torch.linalg.cholesky(information))).mT
        norms = (rows * spread).sum(-1)  # (*B, K): |x|^2 in V(pi)^-1
        worst = torch.where(done, worst, norms.amax(-1))
        done = worst <= rank * (1.0 + eps)
        if wait_for_all(done):
            return OptimalDesign(weights, worst, rank)
        moved = _moved(weights, norms, rank)
        weights = torch.where(done[..., None], weights, moved)
    raise SolverError(f"g_optimal: {int((~done).sum())} designs not within {eps:g} of optimal")


def _whitened(arms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arms with ``sum x x' / K = I`` on their span, the identity off it, and its dimension."""
    gram = arms.mT @ arms / arms.shape[-2]
    eigenvalues, basis = torch.linalg.eigh(gram)
    floor = 64 * arms.shape[-1] * torch.finfo(arms.dtype).eps * eigenvalues[..., -1:]
    inside = (eigenvalues > floor) & (eigenvalues > 0)
    scale = torch.where(inside, eigenvalues.clamp_min(torch.finfo(arms.dtype).tiny).rsqrt(), 0.0)
    off = torch.diag_embed((~inside).to(arms.dtype))
    return (arms @ basis) * scale[..., None, :], off, inside.sum(-1).to(arms.dtype)


def _moved(weights: Tensor, norms: Tensor, rank: Tensor) -> Tensor:
    """One step towards the worst-known arm, or away from the best-known of the support."""
    best, towards = norms.max(-1)
    least, away = torch.where(weights > 0, norms, torch.inf).min(-1)
    retreat = rank - least > best - rank
    arm = torch.where(retreat, away, towards)
    norm = torch.where(retreat, least, best)
    # exact maximiser of log det((1 - a) V + a x x') in a, where the norm exceeds 1
    step = (norm / rank - 1.0) / (norm - 1.0)
    held = weights.gather(-1, arm[..., None])[..., 0]
    drop = -held / (1.0 - held)
    emptied = retreat & ((norm <= 1.0) | (step <= drop))
    step = torch.where(emptied, drop, step)
    vertex = torch.zeros_like(weights).scatter(-1, arm[..., None], 1.0)
    moved = (1.0 - step)[..., None] * weights + step[..., None] * vertex
    # an arm that is dropped is dropped exactly
    cleared = emptied[..., None] & (vertex > 0)
    moved = torch.where(cleared, 0.0, moved.clamp_min(0.0))
    return moved / moved.sum(-1, keepdim=True)
