"""Compiled bounds on quadratic forms, against fifty digits."""

import mpmath
import numba
import numpy as np
import pytest

from torchglb.backend.inverse_forms import PLAIN, least_eigenvalue, plain_bounds


@numba.njit  # not cached: a cache would not see that what it calls has changed
def least(matrix, factor, y):
    return least_eigenvalue(matrix, factor, y)


def least_of(matrix):
    return least(matrix, np.empty_like(matrix), np.empty(len(matrix)))


def shape_of(condition, d, seed):
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    W = basis @ np.diag(np.logspace(0, -np.log10(condition), d)) @ basis.T
    return (W + W.T) / 2


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e8, 1e13])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_the_least_eigenvalue_is_not_below_its_bound(condition, d):
    for seed in range(10):
        W = shape_of(condition, d, seed)
        with mpmath.workdps(50):
            exact = min(mpmath.eigsy(mpmath.matrix(W.tolist()), eigvals_only=True))
        bound = least_of(W)
        assert 0.0 < bound <= exact
        assert bound >= 0.7 * float(exact) / d  # one over a trace of d terms, of which 7/8


def test_no_eigenvalue_is_claimed_where_rounding_could_hide_a_zero():
    W = np.array([[1.0, 1.0 - 2.0**-53], [1.0 - 2.0**-53, 1.0]])
    assert least_of(W) == 0.0
    assert least_of(-W) == 0.0
    assert least_of(np.full((2, 2), np.nan)) == 0.0


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e8, 1e11])
@pytest.mark.parametrize("lopsided", [False, True])
def test_forms_lie_between_the_bounds(condition, lopsided):
    """Of the symmetric part; where plain sums leave doubt they say so, and nothing else."""
    rng = np.random.default_rng(0)
    for d in (1, 2, 6):
        W = shape_of(condition, d, d)
        if lopsided:
            W *= 1.0 + 1e-14 * rng.normal(size=W.shape)
        x = rng.normal(size=(1, 10, d))
        low, high = np.empty((2, 1, 10))
        sure = plain_bounds(x, W[None], low, high)
        assert sure == (not np.isnan(high).any())
        if condition <= 1e3:
            assert sure
        with mpmath.workdps(50):
            M = mpmath.matrix(W.tolist())
            M = (M + M.T) / 2
            for k in np.flatnonzero(~np.isnan(high[0])):
                v = mpmath.matrix(x[0, k].tolist())
                exact = (v.T * mpmath.lu_solve(M, v))[0]
                assert mpmath.mpf(low[0, k]) <= exact <= mpmath.mpf(high[0, k])
                assert high[0, k] - low[0, k] <= 2.1 * PLAIN * float(exact)
