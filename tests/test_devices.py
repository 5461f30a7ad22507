"""Families, history, likelihood and solvers keep to their device, without waiting for it."""

import pytest
import torch
from devices import PRETEND, HostSyncError, assert_stays, on_every_device, running_on
from problems import FAMILY_NAMES, reference_families

import torchglb as glb
from torchglb.linalg import minimize_on_ball
from torchglb.mle import minimize_likelihood
from torchglb.optim import Derivatives, frank_wolfe_gap, lbfgs, newton

D = torch.float64


def vector(device, *shape, dtype=D):
    return torch.rand(shape, dtype=dtype, device=device)


def loss(device, batch=(2,), dtype=D, **extras):
    X, r, w = vector(device, *batch, 5, 3, dtype=dtype), *vector(device, 2, *batch, 5, dtype=dtype)
    return glb.NegativeLogLikelihood(glb.Bernoulli(), X, r, w, **extras)


def history(device, aggregate, rows=5):
    kept = glb.History(3, (2,), aggregate=aggregate, validate=False, dtype=D, device=device)
    kept.append(vector(device, 2, rows, 3), vector(device, 2, rows), vector(device, 2, rows))
    if rows < 64:  # a merged history counts its rows only when a buffer is full
        kept.append(vector(device, 2, 3), vector(device, 2))
    return kept


def backward(device):
    X = vector(device, 5, 3).requires_grad_()
    value = glb.NegativeLogLikelihood(glb.Poisson(), X, vector(device, 5))(vector(device, 3))
    return torch.autograd.grad(value, X)


CASES = {
    # ---- domain and linear algebra
    "project": lambda d: glb.Ball(3, 2.0).project(vector(d, 4, 3)),
    "contains": lambda d: glb.Ball(3, 2.0).contains(vector(d, 4, 3)),
    "support": lambda d: glb.Ball(3, 2.0).support(vector(d, 4, 3)),
    "minimize_on_ball": lambda d: minimize_on_ball(vector(d, 4, 3), vector(d, 4, 3), vector(d, 4)),
    "gap": lambda d: frank_wolfe_gap(vector(d, 4, 3), vector(d, 4, 3), vector(d, 4)),
    # ---- history
    "append": lambda d: history(d, aggregate=False).rows(),
    "append and read": lambda d: (lambda h: (h.X, h.r, h.w))(history(d, aggregate=False)),
    "merge": lambda d: history(d, aggregate=True).rows(),
    "merge many": lambda d: history(d, aggregate=True, rows=300).rows(),
    # ---- likelihood
    "expand": lambda d: loss(d).expand(vector(d, 2, 3)),
    "expand one problem": lambda d: loss(d, ()).expand(vector(d, 3)),
    "expand many points": lambda d: loss(d).expand(vector(d, 2, 6, 3)),
    "expand with extras": lambda d: loss(d, regularization=0.1, tilt=vector(d, 2, 3)).expand(
        vector(d, 2, 3)
    ),
    "ridge per problem": lambda d: loss(d, regularization=vector(d, 2)).expand(vector(d, 2, 3)),
    "value": lambda d: loss(d)(vector(d, 2, 3)),
    "value and gradient": lambda d: loss(d).value_and_gradient(vector(d, 2, 3)),
    "backward": backward,
    # ---- solvers: the body of their steps
    "newton": lambda d: newton(
        lambda t, f=loss(d): Derivatives(*f.expand(t)), vector(d, 2, 3), vector(d, 2), tol=1e-9
    ),
    "lbfgs": lambda d: lbfgs(loss(d).value_and_gradient, vector(d, 2, 3), vector(d, 2), tol=1e-9),
    "newton, one problem": lambda d: newton(
        lambda t, f=loss(d, ()): Derivatives(*f.expand(t)), vector(d, 3), vector(d), tol=1e-9
    ),
    "lbfgs, one problem": lambda d: lbfgs(
        loss(d, ()).value_and_gradient, vector(d, 3), vector(d), tol=1e-9
    ),
    "minimize_likelihood": lambda d: minimize_likelihood(loss(d), glb.Ball(3, 2.0), throw=False),
    "constrained_mle": lambda d: glb.constrained_mle(
        glb.Bernoulli(), history(d, aggregate=True), glb.Ball(3, 2.0), validate=False, throw=False
    ),
    "constrained_mle by lbfgs": lambda d: glb.constrained_mle(
        glb.Poisson(),
        history(d, False),
        glb.Ball(3, 2.0),
        solver="lbfgs",
        validate=False,
        throw=False,
    ),
    "float32": lambda d: minimize_likelihood(
        loss(d, dtype=torch.float32), glb.Ball(3, 2.0), throw=False
    ),
}


@on_every_device
@pytest.mark.parametrize("case", CASES)
def test_core(case, device_name):
    assert_stays(device_name, CASES[case])


@on_every_device
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_family(name, device_name):
    family = reference_families()[name].family

    def call(device):
        z, r = vector(device, 2, 5), vector(device, 2, 5)
        derivatives = [family.derivative(z, order) for order in range(5)]
        return derivatives, family.nll(z, r), family.loss_terms(z, r), family.sample(z)

    assert_stays(device_name, call)


# ---- the helper itself sees what it should ----------------------------------------------------------

SYNCS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "bool": lambda t: bool((t > 0).any()),
    "tolist": lambda t: t.tolist(),
    "while any": lambda t: [None for _ in range(1) if (t > 0).any()],
    "boolean mask": lambda t: t[t > 0],
    "nonzero": lambda t: torch.nonzero(t),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "numpy": lambda t: t.numpy(),
    "mixed operator": lambda t: t + torch.ones(3, dtype=D),
    "number on the CPU": lambda t: t * torch.tensor(2.0, dtype=D),
    "index on the CPU": lambda t: t[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("case", SYNCS)
def test_every_sync_is_caught(case):
    with running_on(PRETEND) as device:
        tensor = vector(device, 3)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            SYNCS[case](tensor)
    kinds = {"DataDependentOutputException", "DynamicOutputShapeException", "RuntimeError"}
    assert isinstance(caught.value, HostSyncError) or type(caught.value).__name__ in kinds


def test_an_output_left_on_the_cpu_is_caught():
    with pytest.raises(AssertionError, match="an output is on cpu"):
        assert_stays(PRETEND, lambda device: torch.zeros(3))


def test_the_loop_may_ask_once_per_step():
    """The patched stopping test counts; nothing else in a solve asks."""
    steps = []

    def evaluate(theta):
        steps.append(1)
        return Derivatives(*loss_here.expand(theta))

    with running_on(PRETEND, steps=5) as device:
        loss_here = loss(device)
        newton(evaluate, vector(device, 2, 3), vector(device, 2), tol=1e-9)
    assert len(steps) == 1 + 5
