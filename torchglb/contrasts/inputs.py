"""What comes in through the doors of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchglb.checks import as_tensor, refuse


def lossless(name: str, value: Any) -> Tensor:
    """In float64 on a CPU: nothing is lost from float32, integers and booleans."""
    if isinstance(value, Tensor) and value.dtype != torch.float64:
        kinds = (torch.float32, torch.float16, torch.int64, torch.int32, torch.bool)
        if value.dtype not in kinds:
            raise refuse(name, "real numbers", value.dtype)
        value = value.to(torch.float64)
    found = as_tensor(name, value, dtype=torch.float64, device=torch.device("cpu"))
    return found.detach() if found.requires_grad else found
