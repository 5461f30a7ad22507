"""Polynomials stored without repetition: against products and tensors written out in full."""

import itertools
import math

import numpy as np
import pytest
import torch

from torchglb.ucb.monomials import Monomials

SIZES = [(1, 2), (1, 6), (2, 3), (2, 6), (3, 4), (4, 5), (10, 3), (20, 2)]
N, ROWS = 3, 7


def names(d, q):
    return [n for k in range(q + 1) for n in itertools.combinations_with_replacement(range(d), k)]


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(("d", "q"), SIZES)
def test_powers_are_the_products_of_entries(d, q):
    x = random(0, N, 2, d)
    found = Monomials(d, q, np.float64).powers(x)
    wanted = np.stack([np.prod(x[..., list(name)], -1) for name in names(d, q)], -1)
    np.testing.assert_allclose(found, wanted, rtol=1e-13)


@pytest.mark.parametrize(("d", "q"), SIZES)
def test_moments_are_sums_over_rows(d, q):
    table, rows = Monomials(d, q, np.float64), random(1, N, ROWS, d)
    columns = [random(2 + k, N, ROWS) for k in range(q + 1)]
    found = table.moments(columns, rows)
    degree = [len(name) for name in names(d, q)]
    powers = table.powers(rows)
    wanted = sum(
        np.stack([columns[k][:, s] for k in degree], -1) * powers[:, s] for s in range(ROWS)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    one = table.moments([column[:, :1] for column in columns], rows[:, :1])
    wanted = np.stack([columns[k][:, 0] for k in degree], -1) * powers[:, 0]
    np.testing.assert_allclose(one, wanted, rtol=1e-13)


@pytest.mark.parametrize(("d", "q"), SIZES)
def test_jets_are_taylor_polynomials(d, q):
    """Of ``sum_s f_s(<x_s, p>)`` with polynomials f_s: value, gradient and Hessian."""
    table, rows = Monomials(d, q, np.float64), random(3, N, ROWS, d)
    columns = [random(20 + k, N, ROWS) for k in range(q + 1)]
    sums = table.moments(columns, rows)
    p = 0.5 * random(4, N, 2, d)
    found = table.jet(sums).at(p)
    z = p @ rows.mT  # (N, 2, rows)

    def derivative(order):
        """Of every f_s at its z."""
        return sum(
            columns[k][:, None] * z ** (k - order) / math.factorial(k - order)
            for k in range(order, q + 1)
        )

    exact = (
        derivative(0).sum(-1),
        derivative(1) @ rows,
        np.einsum("nks,nsi,nsj->nkij", derivative(2), rows, rows),
    )
    for mine, wanted in zip(found, exact, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-10, atol=1e-10 * abs(wanted).max())
    loss, gradient = table.jet(sums).slope(p)
    np.testing.assert_array_equal(loss, found.loss)
    np.testing.assert_array_equal(gradient, found.gradient)
    zero = table.jet(sums).at(np.zeros((N, 1, d)))
    np.testing.assert_allclose(zero.hessian[:, 0], table.hessian(sums), rtol=0, atol=0)


@pytest.mark.parametrize(("d", "q"), [(2, 6), (10, 3)])
def test_tensors_and_arrays_say_the_same(d, q):
    arrays, tensors = (
        Monomials(d, q, np.float64),
        Monomials(d, q, torch.float64, torch.device("cpu")),
    )
    rows, p = random(5, N, ROWS, d), random(6, N, 2, d)
    columns = [random(30 + k, N, ROWS) for k in range(q + 1)]
    sums = arrays.moments(columns, rows)
    same = tensors.moments([torch.from_numpy(c) for c in columns], torch.from_numpy(rows))
    np.testing.assert_allclose(same.numpy(), sums, rtol=1e-12, atol=1e-12)
    there = tensors.jet(torch.from_numpy(sums)).at(torch.from_numpy(p))
    for mine, other in zip(arrays.jet(sums).at(p), there, strict=True):
        np.testing.assert_allclose(other.numpy(), mine, rtol=1e-12, atol=1e-12)


def test_single_precision_stays_single():
    table = Monomials(2, 6, np.float32)
    sums = table.powers(random(7, N, 2).astype(np.float32))
    assert sums.dtype == np.float32
    assert all(t.dtype == np.float32 for t in table.jet(sums).at(np.ones((N, 1, 2), np.float32)))


def test_some_of_the_jets():
    table = Monomials(2, 4, np.float64)
    jet, p = table.jet(random(8, 5, table.count)), random(9, 5, 1, 2)
    some = np.array([3, 1])
    for whole, part in zip(jet.at(p), jet.pick(some).at(p[some]), strict=True):
        np.testing.assert_array_equal(whole[some], part)
