"""Proof, without a GPU, that code keeps to its device.

A made-up accelerator: tensors without data on a device that is not the CPU. Shapes, dtypes and devices
behave as on a GPU; whatever would make the host wait for the device has no data to look at and
raises: ``.item()``, ``float(t)``, ``bool(t)``, ``while t.any()``, boolean masks, ``.cpu()``. A guard
refuses every operator that mixes the CPU with the device.

A test is one line::

    assert_stays(device_name, lambda device: glb.Bernoulli().mean(torch.rand(3, device=device)))

under the decorator ``on_every_device``, which adds real CUDA devices where there are some. There,
torch's own sync debug mode takes the place of the guard.

An object that prepares constants on the host when it is built (a policy, a sequence) is built apart,
``assert_stays(device_name, call, build)``: what ``build`` does may look, what ``call`` does may not.

The host may ask the device whether to go on, and nothing else. The functions that do are listed in
``STOPPING_TESTS``; on the made-up device they are answered by a script.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchglb import arrays
from torchglb.checks import ValueChecks
from torchglb.errors import InputError
from torchglb.optim import result

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


#: the functions in which the host may wait: which problems are open, whether to go on, whether to raise
STOPPING_TESTS = {
    function.__code__
    for function in (arrays.wait_for_indices, arrays.wait_for_all, result.raise_unless_converged)
}
#: the checks of values at public doors that have no ``validate=False``: one wait for each call
DOORS = {ValueChecks.settle.__code__}


def asking(doors: bool) -> CodeType | None:
    """The stopping test (or, if that is allowed, the check at a door) that is running."""
    allowed = STOPPING_TESTS | DOORS if doors else STOPPING_TESTS
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in allowed:
        frame = frame.f_back
    return None if frame is None else frame.f_code


class Guard(TorchDispatchMode):
    """Refuses operators that mix the CPU with the device, and copies from the device to the CPU.

    Args:
        found: what the stopping tests find open, one after the other: "all", "one" or "none".
        doors: whether values may be checked at public doors.
    """

    def __init__(self, found: tuple[str, ...] = (), doors: bool = False) -> None:
        super().__init__()
        self.doors = doors
        self.found = itertools.chain(found, itertools.repeat("none"))
        self.all_done = itertools.cycle([False, False, True])

    def answer(self, asker, func, args):
        """What a stopping test is told."""
        if func is torch.ops.aten.nonzero.default:
            open_ = {"all": args[0].shape[0], "one": min(1, args[0].shape[0]), "none": 0}
            shape = (open_[next(self.found)], args[0].ndim)
            return torch.zeros(shape, dtype=torch.int64, device=args[0].device)
        if asker is arrays.wait_for_all.__code__:
            return next(self.all_done)
        return asker in DOORS  # values are as they should be, and nobody has failed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asks = func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default)
        asker = asking(self.doors) if asks else None
        if asker is not None:
            return self.answer(asker, func, args)
        leaves = pytree.tree_leaves((args, kwargs))
        places = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if len(places) > 1:
            raise HostSyncError(f"{func} mixes {' and '.join(sorted(places))}")
        target = kwargs.get("device")
        if target is not None and torch.device(target).type == "cpu" and places - {"cpu"}:
            raise HostSyncError(f"{func} copies from {places.pop()} to the CPU")
        return func(*args, **kwargs)


class Waiting(TorchDispatchMode):
    """On a real device: lets the stopping tests wait."""

    def __init__(self, doors: bool) -> None:
        super().__init__()
        self.doors = doors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with waiting_allowed() if asking(self.doors) else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def waiting_allowed() -> Iterator[None]:
    """Inside, a CUDA device may make the host wait."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def running_on(
    name: str, steps: int = 3, found: tuple[str, ...] = (), doors: bool = False
) -> Iterator[torch.device]:
    """Inside, ``torch.device`` tensors may be created and used, but not looked at from the host.

    The stopping test of the solvers' loop is the one synchronisation that is allowed: it is replaced
    by a count of ``steps`` for each solve. What the other stopping tests find is told by ``found``.
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
        for module in ("optim.loop", "optim.ball", "ucb.solvers.native", "ucb.solvers.dual_search"):
            stack.enter_context(mock.patch(f"torchglb.{module}.iterate", counted(original)))
        if name == PRETEND:
            stack.enter_context(mock.patch("torchglb.arrays.copied", made_up_numbers))
            for module in ("linalg", "ucb.solvers.sqp"):
                # without data no search is over before its limit: the same operators, 40 times
                stack.enter_context(mock.patch(f"torchglb.{module}.ROOT_STEPS", 2))
            stack.callback(clear_caches)
            clear_caches()
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Guard(found, doors))
            yield PRETEND_DEVICE
        else:
            before = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("error")
            stack.enter_context(Waiting(doors))
            yield torch.device(name, 0)


def clear_caches() -> None:
    """Forgets cached tensors: those of a made-up device are of no use outside of it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchglb"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def made_up_numbers(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """In place of the one copy of constants to a device."""
    return torch.zeros(len(values), dtype=torch.float64, device=device)


def assert_stays(
    name: str,
    call: Callable[..., object],
    build: Callable[[torch.device], object] | None = None,
    *,
    steps: int = 3,
    found: tuple[str, ...] = (),
    doors: bool = False,
) -> None:
    """Runs ``call(device)``: no host synchronisation, and every tensor of the result is there.

    Args:
        name: of the device.
        call: what is examined; returns tensors, or objects that hold some.
        build: makes an object that is passed on, ``call(device, build(device))``; it may look.
        steps: of every solve.
        found: what the stopping tests find open on the made-up device.
        doors: whether values may be checked at public doors, one wait for each call.
    """
    made = []
    if build is not None and name == PRETEND:
        with Believing():
            made.append(build(torch.device("meta")))
            prepare(made)
    elif build is not None:
        made.append(build(torch.device(name, 0)))
    if name != PRETEND:
        call(torch.device(name, 0), *made)  # constants are copied once
    with running_on(name, steps, found, doors) as device:
        if name == PRETEND:
            made = [moved(part) for part in made]
        result = call(device, *made)
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


# ---- objects that were built on the device "meta" ---------------------------------------------------


class Believing(TorchFunctionMode):
    """Whoever looks at a tensor on "meta", to check an argument, finds ones; a search is done."""

    LOOKS = (torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.item, torch.Tensor.tolist)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nonzero and args[0].device.type == "meta":
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        if func in self.LOOKS and args[0].device.type == "meta":
            args = (torch.ones(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


def walk(thing: object, visit: Callable[[object], None], seen: set[int] | None = None) -> None:
    """Visits every object of the project and every container that can be reached."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, torch.Tensor | str | type):
        return
    seen.add(id(thing))
    visit(thing)
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        parts = list(thing)
    else:
        parts = list(vars(thing).values()) if is_ours(thing) else []
    for part in parts:
        walk(part, visit, seen)


def is_ours(thing: object) -> bool:
    """Whether an object has attributes that belong to the project, or is a network."""
    ours = type(thing).__module__.startswith("torchglb") and hasattr(thing, "__dict__")
    return ours or isinstance(thing, torch.nn.Module)


def prepare(thing: object) -> None:
    """Computes every cached property: constants of the theory are prepared on the host, once."""

    def visit(found: object) -> None:
        for name in dir(type(found)) if is_ours(found) else ():
            if isinstance(getattr(type(found), name, None), functools.cached_property):
                with contextlib.suppress(InputError):  # a constant that the family does not have
                    getattr(found, name)

    walk(thing, visit)


def moved(thing: object, done: dict[int, object] | None = None) -> object:
    """Tensors and devices "meta" become those of the made-up accelerator; objects keep identity."""
    done = {} if done is None else done
    if id(thing) in done:
        return done[id(thing)]
    if isinstance(thing, torch.Tensor):
        place = PRETEND_DEVICE if thing.device.type == "meta" else "cpu"
        new = torch.zeros(thing.shape, dtype=thing.dtype, device=place)
    elif isinstance(thing, torch.device):
        new = PRETEND_DEVICE if thing.type == "meta" else thing
    elif isinstance(thing, tuple) and type(thing) is not torch.Size:
        parts = [moved(part, done) for part in thing]
        new = type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)
    else:
        new = thing
        done[id(thing)] = thing
        holder = thing if isinstance(thing, dict) else vars(thing) if is_ours(thing) else None
        if holder is not None:
            for key in list(holder):
                holder[key] = moved(holder[key], done)
        elif isinstance(thing, list):
            thing[:] = [moved(part, done) for part in thing]
    done[id(thing)] = new
    return new
