"""What one evaluated point says of the whole set: a cut from above, a feasible point from below."""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.likelihood import Expansion


def cut_offset(point: Tensor, at: Expansion, level: Tensor, roundings: int = 16) -> Tensor:
    """``b`` of the cut ``<grad L(point), theta> <= b`` that all of ``{L <= B}`` obeys.

    Args:
        point: ``(*, d)``.
        at: the loss there.
        level: B, broadcasts with ``(*)``.
        roundings: how many roundings of the sums behind ``at`` are paid for: b errs upwards.
    """
    offset = level - at.loss + (at.gradient * point).sum(-1)
    size = level.abs() + at.loss.abs() + offset.abs()
    return offset + roundings * torch.finfo(point.dtype).eps * size


def draw_back(point: Tensor, loss: Tensor, hub: Tensor, hub_loss: Tensor, level: Tensor) -> Tensor:
    """The point itself if it is feasible, else where its chord to a feasible hub crosses the level.

    On the segment the loss is at most linear, so the crossing is feasible too.
    """
    share = torch.where(loss <= level, 1.0, (level - hub_loss) / (loss - hub_loss)).clamp(0.0, 1.0)
    return hub + share[..., None] * (point - hub)
