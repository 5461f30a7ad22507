"""Heads around a network on an accelerator: features, predictions, intervals and choices."""

import pytest
import torch
from devices import assert_stays, on_every_device
from torch import nn

import torchglb as glb
from torchglb.heads import GLMHead, NeuralPolicy, UnitBall

BATCH, INPUTS, D = (2,), 4, 2


def numbers(device, *shape):
    return torch.rand(*shape, dtype=torch.float64, device=device)


@on_every_device
@pytest.mark.parametrize("mode", ["clip", "normalize", "smooth"])
def test_unit_ball(mode, device_name):
    assert_stays(device_name, lambda device: UnitBall(mode)(numbers(device, 3, D)))


def build(**options):
    def make(device):
        network = nn.Linear(INPUTS, D, dtype=torch.float64, device=device).requires_grad_(False)
        return GLMHead(
            network,
            glb.Bernoulli(),
            glb.Ball(D, 2.0),
            batch_shape=BATCH,
            validate=False,
            device=device,
            **options,
        )

    return make


def use(device, head):
    head._stamp = head._now()  # the network is the one that the head was built with
    head.update(numbers(device, *BATCH, 3, INPUTS), torch.ones(*BATCH, 3, device=device).double())
    head.update(numbers(device, *BATCH, INPUTS), torch.ones(*BATCH, device=device).double())
    questions = numbers(device, *BATCH, 3, INPUTS)
    return head(questions), head.theta(), head.select(questions), head.confidence(questions)


@on_every_device
@pytest.mark.parametrize("ellipsoidal", [False, True])
def test_head(ellipsoidal, device_name):
    made = build(ellipsoidal=ellipsoidal, radius="mean-loss")
    assert_stays(device_name, use, made, steps=1, doors=True)


@on_every_device
def test_neural_policy_between_trainings(device_name):
    def make(device):
        network = nn.Linear(INPUTS, D, dtype=torch.float64, device=device)
        settings = {"batch_shape": BATCH, "validate": False, "device": device}
        return NeuralPolicy(
            network, "ofuglb-e", glb.Bernoulli(), glb.Ball(D, 2.0), train_every=None, **settings
        )

    def call(device, policy):
        questions, found = numbers(device, *BATCH, 3, INPUTS), []
        for _ in range(2):
            found += [policy.select(questions), policy.scores(questions)]
            policy.update(questions[:, 0], torch.ones(*BATCH, dtype=torch.float64, device=device))
        return found

    assert_stays(device_name, call, make, steps=1)


@on_every_device
def test_neural_policy_trains(device_name):
    """The training itself: an inner policy that computes no constants on the host is enough."""

    def call(device):
        network = nn.Linear(INPUTS, D, dtype=torch.float64, device=device)
        policy = NeuralPolicy(
            network,
            "random",
            glb.Bernoulli(),
            glb.Ball(D, 2.0),
            batch_shape=BATCH,
            validate=False,
            device=device,
            train_every=2,
            steps=2,
        )
        questions, found = numbers(device, *BATCH, 3, INPUTS), []
        for _ in range(3):
            found.append(policy.select(questions))
            policy.update(questions[:, 0], torch.ones(*BATCH, dtype=torch.float64, device=device))
        assert policy.trainings == 1
        return found, dict(policy.encoders.parameters)

    assert_stays(device_name, call, steps=1, doors=True)
