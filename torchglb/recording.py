"""Whether torch records derivatives of a tensor, and whether it may change their precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is looking at one of the tensors."""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def at_hand(*tensors: Tensor) -> bool:
    """Whether numbers may be looked at for nothing: on a CPU, and not within a transform."""
    for tensor in tensors:  # no generator, which an interruption could strike where it is dropped
        if not tensor.is_cpu:
            return False
    return not is_transformed(*tensors)


def is_recorded(*tensors: Tensor) -> bool:
    """Whether one of the tensors carries a graph, a tangent or the mark of a transform."""
    if any(t.requires_grad for t in tensors) or is_transformed(*tensors):
        return True
    # outside a dual level, where nearly all of life takes place, nobody has a tangent
    return forward_ad._current_level >= 0 and any(_has_tangent(t) for t in tensors)


def is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor of the CPU that compiled code may read as it lies in memory.

    Not one whose numbers are somewhere else or have the other sign there: sparse tensors, lazy
    negatives (the imaginary part of a conjugate), zeros without memory.
    """
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and forward_ad._current_level < 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether a derivative with respect to one of the tensors may be asked for."""
    if torch.is_grad_enabled():
        return is_recorded(*tensors)
    return is_recorded(*(t.detach() for t in tensors))


def constant(tensor: Tensor) -> Tensor:
    """The same values without graph and tangent."""
    return forward_ad.unpack_dual(tensor.detach()).primal


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


Given = ParamSpec("Given")
Found = TypeVar("Found")


def without_autocast(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The same function, computed in the dtype of its arguments: half precision proves nothing."""

    @functools.wraps(function)
    def run(*arguments: Given.args, **options: Given.kwargs) -> Found:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*arguments, **options)
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*arguments, **options)

    return run
