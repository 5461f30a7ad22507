"""The type of numbers of any kind, as every door takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor


class SupportsArray(Protocol):
    """What NumPy can read: its own arrays and scalars, columns of pandas and polars."""

    def __array__(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The values."""
        ...


#: tensors, arrays, columns, numbers, and lists of all these;
#: :func:`torchglb.checks.as_tensor` says how they are read
ArrayLike: TypeAlias = Tensor | SupportsArray | float | Sequence["ArrayLike"]
