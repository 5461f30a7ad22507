"""Whether torch records derivatives of a tensor: by a graph, by tangents, or in a transform."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is looking at one of the tensors."""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def is_recorded(*tensors: Tensor) -> bool:
    """Whether one of the tensors carries a graph, a tangent or the mark of a transform."""
    if any(t.requires_grad for t in tensors) or is_transformed(*tensors):
        return True
    # outside a dual level, where nearly all of life takes place, nobody has a tangent
    return forward_ad._current_level >= 0 and any(_has_tangent(t) for t in tensors)


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
