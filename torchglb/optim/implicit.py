"""Implicit differentiation of a solution, to any order that is asked for in practice.

A solver's answer is treated as a constant ``y0`` with ``F(y0, p) = 0``. One Newton step
``y0 - J(y0, p)^-1 F(y0, p)``, written in differentiable operations of the data p, has the value y0
and the exact first derivative of the solution map; because Newton's error is quadratic, k steps
have exactly ``2^k - 1`` correct derivatives. Two steps serve first, second and third derivatives,
and forward and reverse mode alike, with no derivative formula to write down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchglb.errors import SolverError
from torchglb.recording import constant, is_transformed

#: curvature below so many eps of its trace is rounding (measured: 6 eps at most, whatever d)
FLAT = 32


class _Opaque(torch.autograd.Function):
    """A batched solve that derivatives pass by, and that vmap runs with one more batch axis."""

    @staticmethod
    def forward(solve: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return solve(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.count = len(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("no derivative passes through an opaque solve")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[None, ...]:
        return (None,) * ctx.count

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], solve: Any, *tensors: Tensor) -> Any:
        outputs = _Opaque.apply(solve, *_in_front(info, in_dims[1:], tensors))
        return outputs, tuple(0 for _ in outputs)


def _in_front(info: Any, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with the axis that vmap adds as the first of their batch axes."""
    return [
        t.movedim(dim, 0) if dim is not None else t.expand(info.batch_size, *t.shape)
        for t, dim in zip(tensors, dims, strict=True)
    ]


def opaque(solve: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Runs ``solve(*tensors)`` as a constant of differentiation; works under every transform.

    Args:
        solve: takes the tensors with any leading batch axes and returns tensors with the same ones.
        tensors: all tensors the solve depends on, each with the full batch shape.
    """
    if not is_transformed(*tensors):
        with torch.no_grad():
            return solve(*(constant(t) for t in tensors))
    return tuple(_Opaque.apply(solve, *tensors))


def newton_polish(
    system: Callable[[Tensor], tuple[Tensor, Tensor]], solution: Tensor, steps: int, what: str
) -> Tensor:
    """Makes a solution differentiable by Newton steps on the equations that define it.

    Args:
        system: maps ``y (*B, q)`` to the residual ``F (*B, q)`` and Jacobian ``(*B, q, q)``.
        solution: y0, a solution to high accuracy, taken as a constant.
        steps: k; derivatives up to order ``2^k - 1`` are exact.
        what: named in the error when the Jacobian is singular.
    """
    y = solution
    for _ in range(steps):
        residual, jacobian = system(y)
        step, info = torch.linalg.solve_ex(jacobian, residual[..., None])
        if not is_transformed(info, step):
            refuse_singular(what, info != 0)
        y = y - step[..., 0]
    return y


def flat_directions(curvature: Tensor, *normals: Tensor) -> Tensor:
    """A multiple of the projection on the directions in which a solution is free, ``(*B, d, d)``.

    Added to the curvature of a system, it holds the solution where it is in these directions: of
    many solutions one is followed. Exactly 0 for an element that has none of them, and for one that
    is not finite.

    Args:
        curvature: positive semidefinite, ``(*B, d, d)``.
        normals: of the constraints that hold with equality, ``(*B, d)``; 0 for those that do not.
    """
    # a NaN would make eigh raise for the whole batch
    known = torch.isfinite(curvature).flatten(-2).all(-1)[..., None]
    curvature = torch.where(known[..., None], curvature, 0.0)
    size = torch.diagonal(curvature, dim1=-2, dim2=-1).sum(-1)[..., None]
    size = torch.where(size > 0, size, 1.0)
    for normal in normals:
        unit = torch.nn.functional.normalize(torch.where(known, normal, 0.0), dim=-1)
        curvature = curvature + (size * unit)[..., :, None] * unit[..., None, :]
    values, basis = torch.linalg.eigh(curvature)
    flat = (values <= FLAT * torch.finfo(values.dtype).eps * size) & known
    return (basis * (flat * size)[..., None, :]) @ basis.mT


def refuse_singular(what: str, singular: Tensor) -> None:
    """Raises :class:`SolverError` where a solution has no derivative."""
    if bool(singular.any()):
        where = [tuple(i) for i in torch.nonzero(singular).tolist()]
        raise SolverError(
            f"{what} is not a differentiable function of the data: singular optimality system"
            f" at batch elements {where}; a ridge term (regularization > 0) makes it regular"
        )


class _Withheld(torch.autograd.Function):
    """The identity on ``value (*B, ...)``, without a derivative where ``singular`` holds."""

    @staticmethod
    def forward(value: Tensor, singular: Tensor, what: str) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, singular, ctx.what = inputs
        ctx.save_for_backward(singular)
        ctx.save_for_forward(singular)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (singular,) = ctx.saved_tensors
        asked = singular & (grad != 0).reshape(*singular.shape, -1).any(-1)
        if not is_transformed(asked):
            refuse_singular(ctx.what, asked)
        return _unknown(grad, asked), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Any) -> Tensor:
        return _unknown(tangent, *ctx.saved_tensors)  # forward mode carries what nobody asks for

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, what = inputs
        return _Withheld.apply(*_in_front(info, in_dims[:-1], tensors), what), 0


def _unknown(change: Tensor, where: Tensor) -> Tensor:
    """The change ``(*B, ...)``, NaN in the elements ``(*B)``."""
    return change.masked_fill(
        where.reshape(where.shape + (1,) * (change.ndim - where.ndim)), torch.nan
    )


def withheld(value: Tensor, singular: Tensor, what: str) -> Tensor:
    """The same ``value (*B, ...)``; to ask for its derivative where ``singular (*B)`` raises.

    In forward mode, and inside a torch.func transform, which cannot look at values, it is NaN.
    """
    if not is_transformed(singular) and not bool(singular.any()):
        return value
    return _Withheld.apply(value, singular, what)
