"""Every policy on an accelerator: choosing, scoring and learning without a waiting host."""

import pytest
import torch
from devices import assert_stays, on_every_device

import torchglb as glb
from torchglb import policies

BATCH, D, ARMS = (2,), 3, 4


def family_of(name):
    """Bernoulli, or the first family that the policy covers."""
    candidates = (glb.Bernoulli(), glb.Gaussian(0.5))
    return next(family for family in candidates if name in policies.available(family))


def build(name, family=None, **options):
    def make(device):
        extra = {"theta_star": torch.zeros(D, dtype=torch.float64, device=device)}
        return policies.make(
            name,
            family=family or family_of(name),
            domain=glb.Ball(D, 2.0),
            horizon=100,
            batch_shape=BATCH,
            validate=False,
            device=device,
            **(extra if name == "oracle" else {}),
            **options,
        )

    return make


def play(device, policy):
    """A choice before all rows, one row, two rows at once, and a choice after them."""
    there = {"dtype": policy.dtype, "device": device}
    arms = torch.rand(*BATCH, ARMS, D, **there)
    found = policy.select(arms)
    for rows in ((), (2,)):
        policy.update(torch.rand(*BATCH, *rows, D, **there), torch.ones(*BATCH, *rows, **there))
    return found, policy.select(arms)


def play_and_save(device, policy):
    """The same, with all that was learnt."""
    return play(device, policy), policy.state_dict()["state"]


def play_and_score(device, policy):
    """The same, with the scores that are maximised."""
    arms = torch.rand(*BATCH, ARMS, D, dtype=torch.float64, device=device)
    return play(device, policy), policy.scores(arms)


#: settings of another policy's class, which takes the same route
VARIANTS = ("evill-theory", "glb-omd-realised", "glb-omd-rows", "lucb-contrast", "ofulog+")


@on_every_device
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else [])
        for name in policies.available()
    ],
)
def test_policy(name, device_name):
    """With passes over the history for all problems."""
    assert_stays(device_name, play_and_save, build(name), steps=1, found=("all",) * 3)


@pytest.mark.slow
@on_every_device
@pytest.mark.parametrize("name", policies.available())
def test_policy_without_passes_and_its_scores(name, device_name):
    assert_stays(device_name, play_and_score, build(name))


@pytest.mark.slow
@on_every_device
@pytest.mark.parametrize("name", policies.available())
def test_policy_with_passes_for_one(name, device_name):
    assert_stays(device_name, play, build(name), found=("one", "none") * 3)


#: settings that take other routes than the default ones
ROUTES = {
    "ofuglb-e, sharper": ("ofuglb-e", {"ellipsoid": "fixed_point"}),
    "ofuglb-e, gaussian": ("ofuglb-e", {"family": glb.Gaussian(0.5)}),
    "ofuglb-e, pac-bayes": ("ofuglb-e", {"radius": "pac-bayes"}),
    "ofuglb, poisson": ("ofuglb", {"family": glb.Poisson()}),
    "emk, ftrl": ("emk", {"regularizer": "ftrl"}),
    "evill, merged": ("evill", {"aggregate": True}),
    "float32": ("ofuglb-e", {"dtype": torch.float32}),
}


@pytest.mark.slow
@on_every_device
@pytest.mark.parametrize("route", ROUTES)
def test_other_routes(route, device_name):
    name, options = ROUTES[route]
    assert_stays(device_name, play, build(name, **options), steps=1, found=("all",) * 2)
