"""The conic solvers run on the CPU: data are moved there explicitly, with one warning, and back.

A fake tensor has no numbers for a cone solver. So here a tensor keeps its numbers on the CPU and only
says that it is elsewhere; ``.to`` is the one way to move it, and any operator that mixes both places
is refused.
"""

import pytest
import torch
from devices import PRETEND_DEVICE, HostSyncError
from torch.utils import _pytree as pytree

import torchglb as glb
from torchglb.ucb.solvers.conic.oracle import conic_minimum

D = torch.float64
CPU = torch.device("cpu")
MOVES = {torch.Tensor.to, torch.Tensor.cpu}


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device."""

    @property
    def device(self):
        return PRETEND_DEVICE

    @property
    def is_cpu(self):
        return False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.device.__get__:
            return PRETEND_DEVICE
        if func in MOVES:
            return moved(*args, **kwargs)
        if func is torch.Tensor.numpy:
            raise HostSyncError(f"{func} on the device")
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(not isinstance(t, Elsewhere) for t in tensors):
            raise HostSyncError(f"{func} mixes the CPU and the device")
        return super().__torch_function__(func, types, args, kwargs)


def moved(tensor, *where, **options):
    """``Tensor.to`` between both places."""
    place, like = tensor.device, [w for w in where if isinstance(w, torch.Tensor)]
    # sparse ones, which a layer keeps, are plain and cannot be viewed
    plain = tensor.as_subclass(torch.Tensor) if isinstance(tensor, Elsewhere) else tensor
    for target in where:
        if isinstance(target, torch.Tensor):
            place = target.device
        elif isinstance(target, torch.device | str):
            place = torch.device(target)
    dtype = [like[0].dtype] if like else [w for w in where if isinstance(w, torch.dtype)]
    plain = torch.Tensor.to(plain, *dtype) if dtype else plain
    return plain if place == CPU else plain.as_subclass(Elsewhere)


class Places(torch.overrides.TorchFunctionMode):
    """Lets tensors of the CPU be moved elsewhere."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and not isinstance(args[0], Elsewhere):
            return moved(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def there(*values):
    return [torch.tensor(value, dtype=D).as_subclass(Elsewhere) for value in values]


def program():
    X, r, level = there([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0], -0.375)
    loss = glb.NegativeLogLikelihood(glb.Gaussian(), X, r)  # |theta - r|^2/2 - 1/2
    return glb.SublevelProgram(loss, glb.Ball(2, 2.0), level), X


@pytest.mark.parametrize("solver", ["conic", "layer"])
def test_support_goes_to_the_cpu_and_back_with_one_warning(solver):
    with Places(), pytest.warns(UserWarning, match="run on the CPU") as caught:
        found = glb.support(*program(), solver=solver)
    # early versions of cvxpylayers have warnings of their own
    said = [str(w.message) for w in caught if "run on the CPU" in str(w.message)]
    assert len(said) == 1
    assert str(PRETEND_DEVICE) in said[0]
    for name in ("upper", "lower", "theta", "multiplier", "gap", "status"):
        assert getattr(found, name).device == PRETEND_DEVICE, name
    plain = found.upper.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(plain, torch.tensor([1.5, 0.5], dtype=D), rtol=0, atol=1e-6)


def test_minimum_goes_to_the_cpu_and_back_with_one_warning():
    with Places(), pytest.warns(UserWarning, match="run on the CPU") as caught:
        found = conic_minimum(program()[0].likelihood, glb.Ball(2, 2.0))
    assert len(caught) == 1
    assert found.theta.device == found.loss.device == PRETEND_DEVICE
    plain = found.theta.as_subclass(torch.Tensor)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.0], dtype=D), rtol=0, atol=1e-6)


def test_on_the_cpu_nothing_is_said():
    """Warnings are errors in these tests."""
    X, r = torch.eye(2, dtype=D), torch.tensor([1.0, 0.0], dtype=D)
    loss = glb.NegativeLogLikelihood(glb.Gaussian(), X, r)
    made = glb.SublevelProgram(loss, glb.Ball(2, 2.0), torch.tensor(-0.375, dtype=D))
    assert glb.support(made, X, solver="conic").upper.device == CPU


def test_the_helper_refuses_to_mix():
    (x,) = there([1.0, 2.0])
    with pytest.raises(HostSyncError):
        x + torch.ones(2, dtype=D)
    with pytest.raises(HostSyncError):
        x.numpy()
