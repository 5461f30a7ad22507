"""The quadratic below the loss: its rows against fifty digits, its rounds against fresh solves."""

import copy
import math
import pickle

import mpmath
import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb.backend import entry
from torchglb.carried.kernels import LossRows, workspace
from torchglb.carried.model import Constants
from torchglb.families.row_terms import SCRATCH, SECOND, W, Y, Z, least_curvatures
from torchglb.ucb import AnchoredProgram
from torchglb.ucb.incremental.minorant import minorant_in, minorant_size, sum_least_curvatures
from torchglb.ucb.solvers.native import native_support

FAMILIES = {
    "bernoulli": glb.Bernoulli(),
    "binomial": glb.Binomial(7),
    "poisson": glb.Poisson(),
    "probit": glb.QuasiBounded("probit"),
    "cloglog": glb.QuasiBounded("cloglog"),
}
LOG_PARTITIONS = {
    "bernoulli": lambda z: mpmath.log1p(mpmath.exp(z)),
    "binomial": lambda z: 7 * mpmath.log1p(mpmath.exp(z)),
    "poisson": mpmath.exp,
}
S = 4.0


@entry
def _least(family, z, reach, concordance, ball):
    scratch = np.zeros(SCRATCH)
    scratch[Z], scratch[W], scratch[Y] = z, 0.5, reach
    least_curvatures(family, scratch, 1, concordance, ball)
    return scratch[SECOND]


@pytest.mark.parametrize("name", LOG_PARTITIONS)
@pytest.mark.parametrize("z", [-3.5, -0.4, 0.0, 1e-3, 2.0, 4.0])
@pytest.mark.parametrize("reach", [1e-3, 0.01, 0.3, 2.0, 7.0])
@pytest.mark.parametrize("size", [math.inf, 4.0])
def test_least_curvature_of_a_row(name, z, reach, size):
    """Below the divergence at every step, and for the steps that are allowed almost equal to it."""
    family, m = FAMILIES[name], LOG_PARTITIONS[name]
    with mpmath.workdps(50):
        slope, divergences = mpmath.diff(m, z), []
        # a reach below 0.01 counts as that
        low = -max(min(reach, size + z), 0.01)
        high = max(min(reach, size - z), 0.01)
        for share in np.linspace(0.0, 1.0, 61):
            u = mpmath.mpf(low + float(share) * (high - low))
            if abs(u) > 1e-9:
                divergence = m(mpmath.mpf(z) + u) - m(mpmath.mpf(z)) - slope * u
                divergences.append(2 * divergence / (u * u))
        least = 0.5 * min(divergences)
        found = _least(family.compiled(), z, reach, 1.0, size / reach)
        assert found <= least
        if name != "poisson" or z >= 0:
            assert found >= least * (1 - mpmath.mpf("1e-8"))


@entry
def _matrix(family, X, w, memory, constants):
    d = X.shape[0]
    work = workspace(d, 1 + d + d * (d + 1) // 2)
    rows = LossRows(X, w, w)
    sum_least_curvatures(family, rows, X.shape[1], minorant_in(memory, d), constants, work)
    return work.sums[1 + d :].copy()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("reach", [0.2, 3.0, 7.0])
def test_the_quadratic_is_below_the_loss(name, reach, generator):
    """At points of the ball within D, of which some are as far as may be."""
    family, d, n = FAMILIES[name], 4, 150
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    X = X / X.norm(dim=-1, keepdim=True).clamp_min(1.0)
    w = torch.rand(n, generator=generator, dtype=torch.float64)
    c = torch.tensor([1.0, -1.5, 0.5, 0.0], dtype=torch.float64)
    memory = np.zeros(minorant_size(d))
    memory[:d], memory[-5] = c.numpy(), reach
    constants = Constants(S, 1.0, family.self_concordance(S))
    features = np.ascontiguousarray(X.numpy().T)
    triangle = _matrix(family.compiled(), features, w.numpy(), memory, constants)
    M = torch.zeros(d, d, dtype=torch.float64)
    M[tuple(torch.triu_indices(d, d))] = torch.from_numpy(triangle)
    M = M + M.triu(1).mT
    r = family.mean(X @ c).detach()
    loss = glb.NegativeLogLikelihood(family, X, r, w)
    gradient = loss.expand(c).gradient
    v = torch.randn(3000, d, generator=generator, dtype=torch.float64)
    share = torch.rand(3000, 1, generator=generator, dtype=torch.float64).clamp_min(0.5)
    v = reach * v / v.norm(dim=-1, keepdim=True) * (2 * share - 1.0)
    v = v[(c + v).norm(dim=-1) <= S]
    assert len(v) > 100
    true = torch.stack([loss.value(c + step) for step in v[:400]]) - loss.value(c)
    below = v[:400] @ gradient + 0.5 * ((v[:400] @ M) * v[:400]).sum(-1)
    assert (below <= true + 1e-10).all()
    assert torch.linalg.eigvalsh(M)[0] > 0


def _program(family, d, n, generator, **settings):
    theta = torch.zeros(d, dtype=torch.float64)
    theta[0] = 2.0
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    X = X / X.norm(dim=-1, keepdim=True)
    program = AnchoredProgram(family, glb.Ball(d, S), **settings)
    program.append(X, family.sample(X @ theta, generator))
    return program, theta


def _arms(d, generator, K=12):
    arms = torch.randn(K, d, generator=generator, dtype=torch.float64)
    return arms / arms.norm(dim=-1, keepdim=True)


def _reach_and_rows(program):
    """D and the number of rows of the only problem."""
    return program.state_dict()["minorants"][0, [-5, -4]].tolist()


@pytest.mark.parametrize(("name", "d"), [("bernoulli", 8), ("poisson", 4), ("probit", 5)])
def test_rounds_with_a_minorant_are_those_of_fresh_solves(name, d, generator):
    """The same winner and true bounds on all arms, while rows come, the minimum moves, levels vary."""
    family = FAMILIES[name]
    program, theta = _program(family, d, 300, generator)
    used = 0
    for t in range(40):
        arms = _arms(d, generator)
        height = (8.0, 12.0, 25.0, 3.0)[t // 10]
        ridge = 0.0 if t % 3 else 0.5
        choice = program.argmax(arms, radius=height, regularization=ridge)
        stated = program.program(radius=height, regularization=ridge)
        exact = native_support(stated, arms, tol=1e-9)
        assert (choice.upper >= exact.lower - 1e-12).all()
        assert (choice.lower <= exact.upper + 1e-12).all()
        best = exact.upper.max()
        assert exact.lower[choice.index] >= best - 1e-6 * (1 + best)
        used += _reach_and_rows(program)[1] > 0
        x = arms[choice.index]
        program.append(x, family.sample(x @ theta, generator))
    assert used > 10  # it was there


def test_it_spares_passes(generator):
    """With as many anchors, fresh arms in ten dimensions took a pass for almost every arm."""
    program, theta = _program(glb.Bernoulli(), 10, 1500, generator)
    passes = []
    for _ in range(30):
        arms = _arms(10, generator, 20)
        choice = program.argmax(arms, radius=20.0)
        passes.append(float(choice.passes))
        x = arms[choice.index]
        program.append(x, glb.Bernoulli().sample(x @ theta, generator))
    assert np.mean(passes[5:]) < 6.0


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "state"])
def test_copies_continue_bit_by_bit(copied, generator):
    program, theta = _program(glb.Bernoulli(), 8, 400, generator)
    for _ in range(5):
        arms = _arms(8, generator)
        x = arms[program.argmax(arms, radius=10.0).index]
        program.append(x, glb.Bernoulli().sample(x @ theta, generator))
    assert _reach_and_rows(program)[1] > 0
    if copied == "state":
        other = AnchoredProgram(glb.Bernoulli(), glb.Ball(8, S))
        other.load_state_dict(program.state_dict())
    else:
        other = {"deepcopy": copy.deepcopy, "pickle": _pickled}[copied](program)
    for _ in range(20):
        arms = _arms(8, generator)
        mine, its = program.argmax(arms, radius=10.0), other.argmax(arms, radius=10.0)
        assert torch.equal(mine.upper, its.upper)
        assert torch.equal(mine.lower, its.lower)
        assert torch.equal(mine.passes, its.passes)
        x = arms[mine.index]
        r = glb.Bernoulli().sample(x @ theta, generator)
        program.append(x, r)
        other.append(x, r)
    assert torch.equal(program.state_dict()["minorants"], other.state_dict()["minorants"])


def _pickled(program):
    return pickle.loads(pickle.dumps(program))


def test_other_rows_have_no_use_for_it(generator):
    """Rows that are replaced by as many flatter ones: the old matrix would promise too much."""
    program, _ = _program(glb.Bernoulli(), 5, 400, generator)
    for _ in range(3):
        program.argmax(_arms(5, generator), radius=10.0)
    assert _reach_and_rows(program)[1] > 0
    short = 0.05 * _arms(5, generator, 400)
    program.history.load_state_dict(
        _history_of(short, glb.Bernoulli().sample(short[:, 0], generator)).state_dict()
    )
    arms = _arms(5, generator)
    choice = program.argmax(arms, radius=10.0)
    exact = native_support(program.program(radius=10.0), arms, tol=1e-9)
    assert (choice.upper >= exact.lower - 1e-12).all()


def _history_of(X, r):
    other = AnchoredProgram(glb.Bernoulli(), glb.Ball(5, S))
    other.append(X, r)
    return other.history


def test_a_set_that_outgrows_its_reach(generator):
    """A small level first, whose D is small, then a large one: the ellipsoid of the old D is void."""
    program, _ = _program(glb.Bernoulli(), 6, 500, generator)
    for _ in range(4):
        program.argmax(_arms(6, generator, 20), radius=6.0)
    small, rows = _reach_and_rows(program)
    assert rows > 0
    assert small < S
    for height in (60.0, 400.0, math.inf):
        arms = _arms(6, generator, 20)
        choice = program.argmax(arms, radius=height, throw=False)
        exact = native_support(program.program(radius=height), arms, tol=1e-9)
        assert (choice.upper >= exact.lower - 1e-12).all()
        assert exact.lower[choice.index] >= exact.upper.max() - 1e-6 * 5.0


def test_rows_that_leave_a_direction_out_cost_no_passes_for_it(generator):
    """Their matrix is singular: one pass tells, and then it is left alone for some rounds."""
    program = AnchoredProgram(glb.Bernoulli(), glb.Ball(6, S))
    X = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    X[:, 5] = 0.0
    X = X / X.norm(dim=-1, keepdim=True)
    program.append(X, glb.Bernoulli().sample(2.0 * X[:, 0], generator))
    rounds = []
    for _ in range(12):
        arms = _arms(6, generator, 20)
        choice = program.argmax(arms, radius=10.0)
        exact = native_support(program.program(radius=10.0), arms, tol=1e-9)
        assert (choice.upper >= exact.lower - 1e-12).all()
        rounds.append(int(program._rounds._rounds["minorant_passes"][0]))
    assert sum(rounds) <= 2
