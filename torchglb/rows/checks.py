"""Rows at a door: how long they may be, and how they fit their rewards, weights and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import ValueChecks, as_tensor, check_shape
from torchglb.recording import is_transformed

#: what a row of norm 1 may be longer by, in units of the last place of the dtype it was made in
ROUNDINGS = {torch.float64: 64, torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}
#: what to do with rows that are too long
TOO_LONG = (
    "scale them: divide by the largest norm that can come; torchglb.UnitBall() in a network, "
    "torchglb.estimators.Scaler for tables"
)


def within_norm(rows: Tensor, given: object, limit: float | None = 1.0) -> Tensor:
    """Rows ``(..., d)`` with those scaled back that are too long only by rounding.

    A row that was normalised in float32 (float16, bfloat16) and then widened is longer than 1 by
    what that dtype rounds. It is known by its entries, all of which are numbers of that dtype, and
    divided by its length. Rows that are longer than that are returned as they are, to be refused.

    Args:
        rows: as :func:`as_tensor` made them.
        given: what was passed in, which tells the dtype; any object.
        limit: the longest row.
    """
    if limit is None or not rows.numel() or is_transformed(rows):
        return rows
    plain = rows.detach()
    norm = torch.linalg.vector_norm(plain.double(), dim=-1) / limit
    own = 1.0 + ROUNDINGS[rows.dtype] * torch.finfo(rows.dtype).eps
    long = (norm > own) & (norm <= 1.0 + ROUNDINGS[torch.bfloat16] * 2.0**-7)
    if not bool(long.any()):
        return rows
    allowed = torch.full_like(norm, own)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        fits = (plain.to(dtype).to(plain.dtype) == plain).all(-1)
        room = 1.0 + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        # short numbers are common: only who says float16 is taken to have rounded to it
        if dtype == torch.float32 or _said(given) == str(dtype).removeprefix("torch."):
            allowed = torch.where(fits, allowed.clamp_min(room), allowed)
    # rounded up, so that a row is scaled alike in whatever company it comes
    length = torch.ceil(norm * 2.0**40) / 2.0**40
    scale = torch.where(long & (norm <= allowed), 1.0 / length, 1.0)
    return rows * scale.to(rows.dtype)[..., None]


def _said(given: object) -> str:
    """The name of the dtype that an object has, as torch and NumPy write it."""
    return str(getattr(given, "dtype", "")).removeprefix("torch.")


def as_rows(x: Tensor, r: Tensor, batch: tuple[int, ...], dim: int) -> tuple[Tensor, Tensor]:
    """Rows ``(*B, k, d)`` and rewards ``(*B, k)``, of k of them or of one without its axis."""
    if x.ndim == len(batch) + 1:
        check_shape("x", x, (*batch, dim))
        check_shape("r", r, batch)
        return x[..., None, :], r[..., None]
    check_shape("x", x, (*batch, "k", dim))
    check_shape("r", r, (*batch, x.shape[-2]))
    return x, r


def as_weights(
    r: Tensor,
    weight: ArrayLike | None,
    mask: ArrayLike | None,
    batch: tuple[int, ...],
    *,
    values: bool = True,
) -> Tensor:
    """Weights ``(*B, k)`` in [0, 1] like the rewards, 0 where the mask is False."""
    w = torch.ones_like(r, requires_grad=False)
    for name, value in (("weight", weight), ("mask", mask)):
        if value is None:
            continue
        part = as_tensor(name, value, dtype=r.dtype, device=r.device)
        if part.ndim == len(batch) and part.ndim < r.ndim and r.shape[-1] == 1:
            part = part[..., None]
        if part.ndim:
            check_shape(name, part, tuple(r.shape))
        if values:
            checks = ValueChecks()
            fits = (part == 0) | (part == 1) if name == "mask" else (part >= 0) & (part <= 1)
            checks.require(name, fits, "booleans" if name == "mask" else "weights in [0, 1]", part)
            checks.settle()
        w = w * part
    return w
