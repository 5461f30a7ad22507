"""The hot path of the optimistic program on an accelerator: no CPU tensor, no waiting host.

The stopping tests are the only synchronisations: ``any_active`` of the solvers' loop, and ``which``
of the anchored program. Both are answered by a script here; everything else must not look.
"""

import devices
import pytest
import torch
from devices import PRETEND, HostSyncError, assert_stays, on_every_device, running_on

import torchglb as glb
from torchglb.ucb import native_support

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
@pytest.mark.parametrize("found", ["all", "one"])
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


#: from a round without any pass to one in which every fallback is taken
SCRIPTS = {
    "no pass": (),
    "minimum moves": ("all",),
    "minimum moves for one": ("one",),
    "minimum from scratch": ("all", "all", "all"),
    "minimum from scratch for one": ("one", "one", "one"),
    "one evaluation": ("none", "all"),
    "one evaluation of one": ("none", "one"),
    "all arms to tolerance": ("none", "all", "all"),
}


@on_every_device
@pytest.mark.parametrize(
    ("family", "script"),
    [
        *((FAMILIES[0], script) for script in SCRIPTS),
        (FAMILIES[1], "minimum moves for one"),
        (FAMILIES[2], "minimum moves for one"),
    ],
)
def test_anchored_round(device_name, family, script):
    def call(device):
        program = glb.AnchoredProgram(
            family, glb.Ball(3, 3.0), (2, 2), validate=False, anchors=8, device=device
        )
        ones = torch.ones(2, 2, dtype=torch.float64, device=device)
        program.append(0.5 * torch.ones(2, 2, 3, dtype=torch.float64, device=device), ones)
        arms = arms_on(device, batch=(2, 2))
        choice = program.argmax(arms, radius=2.0, regularization=0.5, max_steps=1)
        x = arms.gather(-2, choice.index[..., None, None].expand(2, 2, 1, 3))[..., 0, :]
        program.append(x, ones)
        return choice, program.minimum(), program.state_dict()["bundle"]

    assert_stays(device_name, call, steps=2, found=SCRIPTS[script])


@on_every_device
def test_weighted_round_with_a_given_level(device_name):
    def call(device):
        program = glb.AnchoredProgram(
            glb.Bernoulli(), glb.Ball(2, 3.0), (2,), validate=False, anchors=8, device=device
        )
        ones = torch.ones(2, dtype=torch.float64, device=device)
        program.append(0.5 * torch.ones(2, 2, dtype=torch.float64, device=device), ones, ones)
        return program.argmax(arms_on(device, 2), level=30.0 * ones, value_tol=1e-6)

    assert_stays(device_name, call, found=("all", "none", "all"))


@on_every_device
@pytest.mark.parametrize("d", [1, 2, 3])
def test_arms_of_the_whole_ball(device_name, d):
    def call(device):
        program = program_on(device, glb.Bernoulli(), d)
        return glb.argmax_ball(program, max_rounds=2, throw=False)

    assert_stays(device_name, call, steps=1)


def test_the_stopping_tests_are_synchronisations(monkeypatch):
    """What the tests above answer by a script does synchronise: without it they would raise."""
    monkeypatch.setattr(devices, "STOPPING_TESTS", set())
    with running_on(PRETEND) as device:
        program = glb.AnchoredProgram(
            glb.Bernoulli(), glb.Ball(2, 3.0), (2,), validate=False, anchors=8, device=device
        )
        with pytest.raises((HostSyncError, RuntimeError)):
            program.argmax(arms_on(device, 2), radius=1.0)
