"""What comes in through the doors of this room."""

from __future__ import annotations

import torch
from torch import Tensor

from torchglb.array_like import ArrayLike
from torchglb.checks import as_tensor


def lossless(name: str, value: ArrayLike) -> Tensor:
    """In float64 on a CPU, without a graph."""
    found = as_tensor(name, value, dtype=torch.float64, device=torch.device("cpu"))
    return found.detach() if found.requires_grad else found
