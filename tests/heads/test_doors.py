"""Heads take the dtype of their network, and can be served."""

import pytest
import torch
from door_objects import ball, family

import torchglb as glb


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_take_the_dtype_and_the_axes_of_their_network(dtype):
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    head = glb.GLMHead(network.to(dtype), family(), ball()).eval()
    images, rewards = torch.randn(30, 1, 4, 4), (torch.rand(30) > 0.5).float()
    head.update(images, rewards)
    assert head(images).dtype == head.logits(images).dtype == torch.float64
    torch.testing.assert_close(family().mean(head.logits(images)), head(images))
    assert head(images[0]).shape == head.select(images).shape == ()
    one_by_one = torch.func.vmap(head)(images)
    torch.testing.assert_close(
        one_by_one, head(images), rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(images).dtype == torch.float64
        head.update(images[:3], rewards[:3])
    if dtype == torch.float32:
        head.bfloat16()
        assert head(images).dtype == torch.float64


def test_a_frozen_head_can_be_exported():
    torch.manual_seed(2)
    head = glb.GLMHead(torch.nn.Linear(5, 2), family(), ball())
    contexts = torch.randn(40, 5)
    head.update(contexts, (torch.rand(40) > 0.3).float())
    frozen = head.freeze()
    served = torch.export.export(frozen, (contexts,)).module()(contexts)
    torch.testing.assert_close(served.mean, head.eval()(contexts), rtol=0, atol=1e-6)
    exact = head.confidence(contexts)
    assert bool((served.lower <= exact.lower + 1e-9).all())
    assert bool((served.upper >= exact.upper - 1e-9).all())
    head.update(contexts, torch.ones(40))
    assert torch.equal(frozen(contexts).mean, served.mean)  # it stays as it was
