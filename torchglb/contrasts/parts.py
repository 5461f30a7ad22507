"""Of what an interval consists, for tables and pictures."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchglb.contrasts.look import Look


class ContrastParts(NamedTuple):
    """Of what the half width of the upper end consists, ``(*B, m)`` each; NaN without lines.

    Attributes:
        slab: what the weighted rewards leave open at one scale.
        leak: by directions of theta other than c that the weights do not cancel.
        bend: by the curvature of the mean over the joint set, beyond the leak.
        joint: the half width of the joint set's ellipsoid.

    Example:
        >>> import torchglb as glb
        >>> given = (glb.Gaussian(), glb.Ball(2, 3.0), {"B-A": [-1.0, 1.0]})
        >>> sequence = glb.ContrastSequence(*given, delta=0.05)
        >>> sequence.update([[1.0, 0.0], [0.0, 1.0]] * 200, [0.5, 2.5] * 200)
        >>> parts = sequence.parts()
        >>> bool((parts.slab > 0).all()), parts.leak.shape
        (True, torch.Size([1]))
    """

    slab: Tensor
    leak: Tensor
    bend: Tensor
    joint: Tensor


def parts_table(looks: list[Look], log_level: float) -> Tensor:
    """The fields of :class:`ContrastParts` for contrasts of length 1, ``(4, N, m)``.

    Args:
        looks: of the N problems.
        log_level: of the contrasts' martingales.
    """
    m = len(looks[0].at_center) if looks else 0
    table = torch.full((4, len(looks), m), torch.nan, dtype=torch.float64)
    for i, seen in enumerate(looks):
        for j, lines in enumerate(seen.lines):
            table[3, i, j] = seen.joint[j]
            upper = [line for line in lines if line.alpha < 0]
            if not upper:
                continue
            line = min(upper, key=lambda k: (log_level - k.log_weight - k.base) / abs(k.alpha))
            pieces = (log_level - line.log_weight - line.score, line.leak, line.bent - line.leak)
            table[:3, i, j] = torch.tensor(pieces, dtype=torch.float64) / abs(line.alpha)
    return table
