"""The G-optimal design against the theorem of Kiefer and Wolfowitz and an independent optimiser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch

from torchglb.errors import InputError, SolverError
from torchglb.policies.design import g_optimal
from torchglb.testing.policies import unit_arms

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _one_thread():
    """These problems are so small that a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def worst_norm(arms: np.ndarray, weights: np.ndarray) -> float:
    """``max |x|^2`` in the (pseudo-)inverse of V(pi)."""
    inverse = np.linalg.pinv((arms.T * weights) @ arms, rcond=1e-10, hermitian=True)
    return float(np.einsum("ki,ij,kj->k", arms, inverse, arms).max())


@pytest.mark.parametrize(("K", "d"), [(3, 1), (5, 2), (20, 2), (30, 5), (60, 10), (10, 10)])
def test_kiefer_wolfowitz_within_one_percent(K, d):
    arms = unit_arms(4, K, d, seed=K + d)
    design = g_optimal(arms)
    assert design.weights.shape == (4, K)
    assert bool((design.weights >= 0).all())
    torch.testing.assert_close(design.weights.sum(-1), torch.ones(4, dtype=DTYPE))
    assert design.rank.tolist() == [d] * 4
    for b in range(4):
        found = worst_norm(arms[b].numpy(), design.weights[b].numpy())
        assert d - 1e-9 <= found <= 1.01 * d  # no design is better than d
        assert float(design.worst[b]) == pytest.approx(found, rel=1e-6)


def test_any_accuracy_may_be_asked_for():
    arms = unit_arms(20, 3, seed=3)
    design = g_optimal(arms, eps=1e-8)
    assert worst_norm(arms.numpy(), design.weights.numpy()) <= 3 * (1 + 1.1e-8)


def test_the_same_design_maximises_the_determinant():
    arms = unit_arms(12, 3, seed=11).numpy()

    def volume(free: np.ndarray) -> float:
        weights = np.exp(free - free.max())
        weights /= weights.sum()
        return -float(np.linalg.slogdet((arms.T * weights) @ arms)[1])

    best = -scipy.optimize.minimize(volume, np.zeros(12), method="BFGS", options={"gtol": 1e-9}).fun
    weights = g_optimal(torch.tensor(arms), eps=1e-6).weights.numpy()
    ours = float(np.linalg.slogdet((arms.T * weights) @ arms)[1])
    assert ours == pytest.approx(best, abs=1e-5)


def test_known_designs():
    eye = torch.eye(3, dtype=DTYPE)
    torch.testing.assert_close(g_optimal(eye).weights, torch.full((3,), 1 / 3, dtype=DTYPE))
    # an arm inside the ellipsoid of the others has no part in it
    arms = torch.cat([torch.eye(2, dtype=DTYPE), torch.tensor([[0.5, 0.0]], dtype=DTYPE)])
    expected = torch.tensor([0.5, 0.5, 0.0], dtype=DTYPE)
    torch.testing.assert_close(g_optimal(arms, eps=1e-9).weights, expected, atol=1e-6, rtol=0)
    # in one dimension: the longest arm
    line = torch.tensor([[0.2], [-0.9], [0.5]], dtype=DTYPE)
    torch.testing.assert_close(
        g_optimal(line, eps=1e-9).weights,
        torch.tensor([0.0, 1.0, 0.0], dtype=DTYPE),
        atol=1e-8,
        rtol=0,
    )


def test_arms_that_do_not_span_the_space():
    flat = unit_arms(10, 2, seed=5)
    lift = torch.tensor([[0.6, 0.0, 0.8, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=DTYPE)
    design = g_optimal(flat @ lift)
    assert float(design.rank) == 2
    assert float(design.worst) <= 2.02
    torch.testing.assert_close(design.weights, g_optimal(flat).weights, atol=1e-8, rtol=0)


def test_duplicates_zero_arms_and_one_arm():
    arms = unit_arms(3, 2, seed=1)
    doubled = torch.cat([arms, arms, torch.zeros(1, 2, dtype=DTYPE)])
    design = g_optimal(doubled)
    assert worst_norm(doubled.numpy(), design.weights.numpy()) <= 2.02
    nothing = g_optimal(torch.zeros(3, 2, dtype=DTYPE))
    assert float(nothing.rank) == 0
    assert float(nothing.weights.sum()) == pytest.approx(1.0)
    assert g_optimal(arms[:1]).weights.tolist() == [1.0]


def test_batch_equals_loop():
    arms = unit_arms(2, 3, 9, 4, seed=2)
    arms[0, 1] *= 1e-3  # one problem is easy for others and hard for itself: none waits for it
    arms[1, 2, :, 3] = 0.0
    together = g_optimal(arms)
    for i in range(2):
        for j in range(3):
            alone = g_optimal(arms[i, j])
            torch.testing.assert_close(together.weights[i, j], alone.weights, atol=1e-10, rtol=0)


def test_refusals():
    with pytest.raises(InputError, match="arms"):
        g_optimal(torch.zeros(0, 2, dtype=DTYPE))
    with pytest.raises(InputError, match="eps"):
        g_optimal(unit_arms(3, 2), eps=0.0)
    with pytest.raises(SolverError, match="not within"):
        g_optimal(unit_arms(30, 5), eps=1e-12, max_steps=3)
    assert math.isfinite(float(g_optimal(unit_arms(3, 2)).worst))
