"""Proof, without a GPU, that code keeps to its device.

A made-up accelerator: tensors without data on a device that is not the CPU. Shapes, dtypes and devices
behave as on a GPU; whatever would make the host wait for the device has no data to look at and
raises: ``.item()``, ``float(t)``, ``bool(t)``, ``while t.any()``, boolean masks, ``.cpu()``. A guard
refuses every operator that mixes the CPU with the device.

A test is one line::

    assert_stays(device_name, lambda device: glb.Bernoulli().mean(torch.rand(3, device=device)))

under the decorator ``on_every_device``, which adds real CUDA devices where there are some. There,
torch's own sync debug mode takes the place of the guard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PRETEND = "pretend"
DEVICES = [PRETEND, *(["cuda"] if torch.cuda.is_available() else [])]

on_every_device = pytest.mark.parametrize("device_name", DEVICES)


class HostSyncError(AssertionError):
    """The host touched the device: a copy, or an operator over both."""


def _register() -> torch.device:
    """The made-up accelerator; ``meta`` where torch no longer offers to register one."""
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError:
        return torch.device("meta")
    _setup_privateuseone_for_python_backend(PRETEND)
    return torch.device(PRETEND, 0)


#: registered on import: autograd counts the devices when it first runs
PRETEND_DEVICE = _register()


class Guard(TorchDispatchMode):
    """Refuses operators that mix the CPU with the device, and copies from the device to the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        places = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if len(places) > 1:
            raise HostSyncError(f"{func} mixes {' and '.join(sorted(places))}")
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == "cpu" and places - {"cpu"}:
            raise HostSyncError(f"{func} copies from {places.pop()} to the CPU")
        return func(*args, **kwargs)


@contextlib.contextmanager
def running_on(name: str, steps: int = 3) -> Iterator[torch.device]:
    """Inside, ``torch.device`` tensors may be created and used, but not looked at from the host.

    The stopping test of the solvers' loop is the one synchronisation that is allowed: it is replaced
    by a count of ``steps`` for each solve.
    """

    def counted(iterate):
        def run(*arguments):
            left = iter(range(steps))
            with mock.patch(
                "torchglb.optim.loop.any_active", lambda _: next(left, None) is not None
            ):
                return iterate(*arguments)

        return run

    from torchglb.optim import loop

    with contextlib.ExitStack() as stack:
        original = loop.iterate
        for module in ("torchglb.optim.loop", "torchglb.optim.ball", "torchglb.ucb.native"):
            stack.enter_context(mock.patch(f"{module}.iterate", counted(original)))
        if name == PRETEND:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Guard())
            yield PRETEND_DEVICE
        else:
            before = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("error")
            yield torch.device(name, 0)


def assert_stays(name: str, call: Callable[[torch.device], object], steps: int = 3) -> None:
    """Runs ``call(device)``: no host synchronisation, and every tensor of the result is there."""
    with running_on(name, steps) as device:
        result = call(device)
        tensors = [t for t in leaves_of(result) if isinstance(t, torch.Tensor)]
    assert tensors, "the call returns no tensor"
    for tensor in tensors:
        assert tensor.device.type == device.type, f"an output is on {tensor.device}"


def leaves_of(result: object) -> list[object]:
    """The leaves of tuples, lists, dicts and of objects that carry tensors."""
    leaves = []
    for leaf in pytree.tree_leaves(result):
        fields = getattr(leaf, "__dict__", None)
        if isinstance(leaf, torch.Tensor) or not fields:
            leaves.append(leaf)
        else:
            leaves.extend(leaves_of(dict(fields)))
    return leaves
