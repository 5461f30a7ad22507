"""The tridiagonal form of a symmetric matrix, and what is solved with it."""

import numpy as np
import pytest

from torchglb.backend import entry
from torchglb.backend.tridiagonal import (
    factor_shifted,
    multiply_rotated,
    rotate,
    rotate_back,
    solve_shifted,
    tridiagonal_form,
    tridiagonal_memory,
)


@entry
def _solve(matrix, scale, shift, b, out):
    """Into ``out``: the solution, the diagonal, what stands beside it, and T Q'b; whether it is."""
    d = b.shape[0]
    form, work, pivots = tridiagonal_memory(d), np.zeros(d), np.zeros(d)
    tridiagonal_form(matrix, form, work)
    rotate(form, b, work)
    multiply_rotated(form, work, out[3])
    found = factor_shifted(form, scale, shift, pivots)
    if found:
        solve_shifted(form, scale, pivots, work, out[0])
        rotate_back(form, out[0])
    for k in range(d):
        out[1, k], out[2, k] = form.diagonal[k], form.beside[k]
    return found


def _tridiagonal(out):
    beside = out[2, :-1]
    return np.diag(out[1]) + np.diag(beside, 1) + np.diag(beside, -1)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 20, 50])
@pytest.mark.parametrize("kind", ["dense", "diagonal", "rank one", "blocks", "zero"])
def test_form_and_solutions(d, kind):
    """The same eigenvalues, and solutions of shifted systems as by a dense solver."""
    random = np.random.default_rng(d)
    root = random.normal(size=(d, d))
    matrix = {
        "dense": root @ root.T,
        "diagonal": np.diag(random.uniform(size=d)),
        "rank one": np.outer(root[0], root[0]),
        "blocks": np.kron(np.eye(2), root @ root.T)[:d, :d],
        "zero": np.zeros((d, d)),
    }[kind]
    b, out = random.normal(size=d), np.zeros((4, d))
    assert _solve(matrix, 0.7, 0.3, b, out)
    size = 1.0 + np.abs(matrix).sum()
    np.testing.assert_allclose(
        np.linalg.eigvalsh(_tridiagonal(out)), np.linalg.eigvalsh(matrix), atol=1e-14 * size
    )
    system = 0.7 * matrix + 0.3 * np.eye(d)
    np.testing.assert_allclose(system @ out[0], b, atol=1e-13 * size)
    # Q keeps lengths: |T Q'b| = |M b|
    assert np.linalg.norm(out[3]) == pytest.approx(np.linalg.norm(matrix @ b), abs=1e-13 * size)


def test_not_positive_definite():
    """A shift below the least eigenvalue is told from one above it."""
    random = np.random.default_rng(0)
    root = random.normal(size=(6, 9))
    matrix, out = root @ root.T, np.zeros((4, 6))
    least = np.linalg.eigvalsh(matrix)[0]
    assert _solve(matrix, 1.0, -0.999 * least, np.ones(6), out)
    assert not _solve(matrix, 1.0, -1.001 * least, np.ones(6), out)
    assert not _solve(np.full((6, 6), np.nan), 1.0, 1.0, np.ones(6), out)
