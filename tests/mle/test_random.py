"""The constrained MLE on random problems of every kind, against independent solvers.

Asked of every problem: a Frank-Wolfe gap of at most ``1e-8 (1 + |loss|)``, no point outside the ball
beyond rounding, and a loss that no other solver undercuts by more than 1e-7 relative. The certificate
is computed here again, in NumPy, from nothing but theta.
"""

import numpy as np
import pytest
from problems import CONIC_NAMES, FAMILY_NAMES, KINDS, Problem, random_problem, reference_minimum

import torchglb as glb
from torchglb.ucb.solvers.conic.oracle import conic_minimum

ALL = range(500)
#: some of the 500, with a stride that meets every kind with every family
SOME = range(0, 500, 9)
ACTIVE = 1 - 1e-6  # of the radius


def family_of(seed: int) -> str:
    return random_problem(seed, most_rows=1).name.split("-")[2]


def check_certificate(problem: Problem, fit: glb.MLEResult) -> float:
    """Recomputes loss and gap in NumPy; returns the loss."""
    theta, S = fit.theta.numpy(), problem.radius
    loss, gradient = problem.loss(theta)
    size = 1.0 + abs(loss)
    assert np.linalg.norm(theta) <= S * (1 + 4e-16 * len(theta))
    assert abs(float(fit.loss) - loss) <= 1e-12 * size
    steepness = np.linalg.norm(gradient)
    gap = gradient @ theta + S * steepness
    # rounding of the products that cancel in this plain formula
    assert gap <= 1e-8 * size + 1e-15 * S * steepness
    assert float(fit.gap) <= 1e-8 * size
    assert float(fit.gap) >= gap - 1e-11 * size
    return loss


def check(problem: Problem) -> None:
    reference = reference_minimum(problem)
    for solver in ("newton", "lbfgs"):
        fit = glb.constrained_mle(problem.family, problem.rows, problem.domain, solver=solver)
        loss = check_certificate(problem, fit)
        assert loss <= reference + 1e-7 * abs(reference) + 1e-9


@pytest.mark.parametrize("seed", SOME)
def test_random_problem(seed):
    check(random_problem(seed))


@pytest.mark.parametrize("seed", [s for s in range(0, 300, 7) if family_of(s) in CONIC_NAMES][:14])
def test_random_problem_against_the_cone_solver(seed):
    problem = random_problem(seed, most_rows=200, most_features=10)
    likelihood = glb.NegativeLogLikelihood(problem.family, *problem.rows)
    fit = glb.constrained_mle(problem.family, problem.rows, problem.domain)
    check_certificate(problem, fit)
    _, loss = conic_minimum(likelihood, problem.domain)
    assert float(fit.loss) <= float(loss) + 1e-7 * abs(float(loss)) + 1e-7


def test_the_problems_are_of_all_kinds():
    names = [random_problem(seed).name.split("-") for seed in SOME]
    assert {name[1] for name in names} == set(KINDS)
    assert {name[2] for name in names} == set(FAMILY_NAMES)
    fits = [
        glb.constrained_mle(p.family, p.rows, p.domain) for p in (random_problem(s) for s in SOME)
    ]
    active = [
        float(fit.theta.norm()) >= random_problem(s).radius * ACTIVE
        for fit, s in zip(fits, SOME, strict=True)
    ]
    assert 15 <= sum(active) <= 45


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_every_random_problem(seed):
    check(random_problem(seed))
