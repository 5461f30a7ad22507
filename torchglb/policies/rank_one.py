"""The inverse and log-determinant of a matrix that grows by one outer product at a time.

With ``A <- A + w x x'`` and ``u = A^-1 x``, ``q = <x, u>`` (Sherman and Morrison):

    ``A^-1 <- A^-1 - w u u' / (1 + w q)``,  ``log det A <- log det A + log(1 + w q)``,

O(d^2) per step instead of O(d^3). Rounding errors accumulate, so A itself is kept too, the drift
``|A (A^-1 x) - x|`` is watched at every step, and the inverse is made afresh from a Cholesky factor
where it drifts and every so often in any case.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchglb.arrays import known_none
from torchglb.checks import check_shape
from torchglb.linalg import cholesky

#: steps after which the inverse is made afresh whatever its drift
LIFETIME = 512


class RankOneInverse:
    """A positive definite matrix ``(*B, d, d)`` with its inverse and log-determinant.

    Args:
        matrix: A at the beginning, ``(*B, d, d)``.

    Example:
        >>> A = RankOneInverse(torch.eye(2, dtype=torch.float64))
        >>> A.add(torch.tensor([1.0, 0.0], dtype=torch.float64))
        >>> A.solve(torch.tensor([1.0, 1.0], dtype=torch.float64))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.clone()
        self.inverse, self.logdet = _afresh(self.matrix)
        self._age = 0
        self._limit = torch.finfo(matrix.dtype).eps ** 0.75  # 2e-12 in float64, 6e-6 in float32

    @classmethod
    def scaled_identity(
        cls, scale: Tensor | float, batch_shape: tuple[int, ...], dim: int, like: Tensor
    ) -> RankOneInverse:
        """Starts at ``scale * I``; the scale is a number or broadcasts with ``*B``."""
        eye = torch.eye(dim, dtype=like.dtype, device=like.device)
        factor = torch.as_tensor(scale, dtype=like.dtype, device=like.device)
        return cls(factor[..., None, None] * eye.expand(*batch_shape, dim, dim))

    def copy(self) -> RankOneInverse:
        """Another one; what changes it replaces its tensors, and never writes into them."""
        return copy.copy(self)

    def plus_rows(self, X: Tensor, weight: Tensor | None = None) -> RankOneInverse:
        """:meth:`add_rows` to a copy."""
        new = self.copy()
        new.add_rows(X, weight)
        return new

    def add(self, x: Tensor, weight: Tensor | None = None) -> None:
        """``A += w x x'``; ``x`` is ``(*B, d)``, ``weight`` >= 0 is ``(*B)``, 1 if left out."""
        scaled = x if weight is None else weight[..., None] * x
        u = self.solve(x)
        growth = 1.0 + (scaled * u).sum(-1)
        self.matrix = self.matrix + scaled[..., :, None] * x[..., None, :]
        step = u if weight is None else weight[..., None] * u
        step = step / growth[..., None]
        self.inverse = self.inverse - step[..., :, None] * u[..., None, :]
        self.logdet = self.logdet + growth.log()
        self._age += 1
        # a vector of the direction that has just changed: what A^-1 does to it must be undone by A
        back = (self.matrix @ self.solve(x)[..., None])[..., 0]
        error = torch.linalg.vector_norm(back - x, dim=-1)
        drifted = ~(error <= self._limit * torch.linalg.vector_norm(x, dim=-1))
        self.refresh(drifted if self._age < LIFETIME else torch.ones_like(drifted))
        self._age %= LIFETIME

    def add_rows(self, X: Tensor, weight: Tensor | None = None) -> None:
        """``A += sum_i w_i x_i x_i'`` for ``X (*B, k, d)`` and ``weight (*B, k)``."""
        if X.shape[-2] == 1:
            self.add(X[..., 0, :], None if weight is None else weight[..., 0])
            return
        scaled = X if weight is None else weight[..., None] * X
        self.matrix = self.matrix + scaled.mT @ X
        self.inverse, self.logdet = _afresh(self.matrix)
        self._age = 0

    def refresh(self, mask: Tensor) -> None:
        """Makes inverse and log-determinant afresh where ``mask (*B)`` says so."""
        if known_none(mask):
            return
        inverse, logdet = _afresh(self.matrix)
        self.inverse = torch.where(mask[..., None, None], inverse, self.inverse)
        self.logdet = torch.where(mask, logdet, self.logdet)

    def take(self, mask: Tensor, other: RankOneInverse) -> None:
        """Becomes the other matrix where ``mask (*B)`` says so."""
        square = mask[..., None, None]
        self.matrix = torch.where(square, other.matrix, self.matrix)
        self.inverse = torch.where(square, other.inverse, self.inverse)
        self.logdet = torch.where(mask, other.logdet, self.logdet)

    def solve(self, b: Tensor) -> Tensor:
        """``A^-1 b`` for ``b (*B, d)``."""
        return (self.inverse @ b[..., None])[..., 0]

    def squared_norms(self, X: Tensor) -> Tensor:
        """``|x|^2`` in A^-1 of every row of ``X (*B, K, d)``: ``(*B, K)``."""
        return ((X @ self.inverse) * X).sum(-1).clamp_min(0.0)

    def norms(self, X: Tensor) -> Tensor:
        """``|x|`` in A^-1 of every row of ``X (*B, K, d)``: ``(*B, K)``."""
        return self.squared_norms(X).sqrt()

    def state_dict(self) -> dict[str, Any]:
        """The matrix with its inverse as it stands, to continue bit by bit."""
        names = ("matrix", "inverse", "logdet")
        return {"age": self._age} | {name: getattr(self, name).clone() for name in names}

    def loaded(self, state: Mapping[str, Any]) -> RankOneInverse:
        """:meth:`load_state_dict` into a copy."""
        new = self.copy()
        new.load_state_dict(state)
        return new

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another shape."""
        for name in ("matrix", "inverse", "logdet"):
            check_shape(f"state[{name!r}]", state[name], getattr(self, name).shape)
        self.matrix = state["matrix"].to(self.matrix).clone()
        self.inverse = state["inverse"].to(self.matrix).clone()
        self.logdet = state["logdet"].to(self.matrix).clone()
        self._age = int(state["age"])


def _afresh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    factor = cholesky(matrix)
    logdet = 2.0 * torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    return torch.cholesky_inverse(factor), logdet
