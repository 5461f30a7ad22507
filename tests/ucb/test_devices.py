"""The hot path of the optimistic program on an accelerator: no CPU tensor, no waiting host.

The stopping tests are the only synchronisations: ``any_active`` of the solvers' loop, and ``which``
of the anchored program. Both are answered by a script here; everything else must not look.
"""

import devices
import pytest
import torch
from devices import PRETEND, HostSyncError, assert_stays, on_every_device, running_on

import torchglb as glb
from torchglb.ucb import RefitProgram, native_support

FAMILIES = [glb.Bernoulli(), glb.Gaussian(0.5), glb.Poisson()]


def program_on(device, family, d=3, n=10, batch=(2,), **options):
    X = 0.5 * torch.rand(*batch, n, d, dtype=torch.float64, device=device)
    r = torch.ones(*batch, n, dtype=torch.float64, device=device)
    loss = glb.NegativeLogLikelihood(family, X, r, **options)
    level = torch.full(batch, 20.0, dtype=torch.float64, device=device)
    return glb.SublevelProgram(loss, glb.Ball(d, 3.0), level)


def arms_on(device, d=3, K=4, batch=(2,)):
    return torch.rand(*batch, K, d, dtype=torch.float64, device=device)


@on_every_device
@pytest.mark.parametrize(("family", "d"), [*zip(FAMILIES, [1, 3, 6], strict=True)])
def test_native_support(device_name, family, d):
    def call(device):
        program, arms = program_on(device, family, d), arms_on(device, d)
        return native_support(program, arms, throw=False, validate=False)

    assert_stays(device_name, call, steps=2)


@on_every_device
@pytest.mark.parametrize("found", ["all", pytest.param("one", marks=pytest.mark.slow)])
def test_native_support_by_prices(device_name, found):
    def call(device):
        program, arms = program_on(device, glb.Bernoulli()), arms_on(device)
        return native_support(program, arms, throw=False, validate=False)

    assert_stays(device_name, call, steps=2, found=(found,))


@on_every_device
def test_native_support_with_a_center_and_a_ridge(device_name):
    def call(device):
        program = program_on(
            device, glb.Bernoulli(), regularization=torch.ones(2, device=device).double()
        )
        center = torch.zeros(2, 3, dtype=torch.float64, device=device)
        return native_support(program, arms_on(device), center=center, throw=False, validate=False)

    assert_stays(device_name, call)


#: what the searches for stuck arms find: none, one, all
SCRIPTS = {"no arm is stuck": (), "one arm is stuck": ("one",), "all arms are stuck": ("all",)}
#: each family and each script at least once by default
BY_DEFAULT = {(0, "one arm is stuck"), (1, "all arms are stuck"), (2, "no arm is stuck")}
ROUNDS = [
    pytest.param(family, script, marks=[] if (i, script) in BY_DEFAULT else pytest.mark.slow)
    for i, family in enumerate(FAMILIES)
    for script in SCRIPTS
]


@on_every_device
@pytest.mark.parametrize(("family", "script"), ROUNDS)
def test_rounds_of_a_growing_history(device_name, family, script):
    def call(device):
        program = RefitProgram(family, glb.Ball(3, 3.0), (2, 2), validate=False, device=device)
        ones = torch.ones(2, 2, dtype=torch.float64, device=device)
        program.append(0.5 * torch.ones(2, 2, 3, dtype=torch.float64, device=device), ones)
        arms = arms_on(device, batch=(2, 2))
        choice = program.argmax(arms, radius=2.0, regularization=0.5, max_steps=1)
        x = arms.gather(-2, choice.index[..., None, None].expand(2, 2, 1, 3))[..., 0, :]
        program.append(x, ones)
        again = program.argmax(arms, level=30.0 * ones, value_tol=1e-6)
        return choice, again, program.minimum(), program.state_dict()["start"]

    assert_stays(device_name, call, steps=2, found=SCRIPTS[script])


@on_every_device
@pytest.mark.parametrize("d", [1, 2, 3])
def test_arms_of_the_whole_ball(device_name, d):
    def call(device):
        program = program_on(device, glb.Bernoulli(), d)
        return glb.argmax_ball(program, max_rounds=2, throw=False, validate=False)

    assert_stays(device_name, call, steps=1)


def test_the_stopping_tests_are_synchronisations(monkeypatch):
    """What the tests above answer by a script does synchronise: without it they would raise."""
    monkeypatch.setattr(devices, "STOPPING_TESTS", set())
    with running_on(PRETEND) as device:
        program = RefitProgram(
            glb.Bernoulli(), glb.Ball(2, 3.0), (2,), validate=False, device=device
        )
        with pytest.raises((HostSyncError, RuntimeError)):
            program.argmax(arms_on(device, 2), radius=1.0)
