"""What comes in through the doors of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchglb.checks import as_tensor


def lossless(name: str, value: Any) -> Tensor:
    """In float64 on a CPU, without a graph."""
    found = as_tensor(name, value, dtype=torch.float64, device=torch.device("cpu"))
    return found.detach() if found.requires_grad else found
