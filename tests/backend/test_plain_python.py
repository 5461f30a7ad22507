"""``NUMBA_DISABLE_JIT=1`` runs the same functions without a compiler, for debuggers.

One process without a compiler computes every case of ``CASES``, this one does it with compiled
code. A product and a sum are rounded together in compiled code only, so numbers agree to that.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torchglb as glb
from torchglb import policies, radii
from torchglb.linalg import inverse_form_bounds

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import test_parts
from problems import random_problem

D = torch.float64


def unit(generator, *shape):
    drawn = torch.randn(shape, generator=generator, dtype=D)
    return 0.99 * torch.nn.functional.normalize(drawn, dim=-1)


def parts():
    given = test_parts.arguments()
    return [test_parts.called(*given), *given[4]]


def programs():
    """Rounds of the incremental program, its minimum, and its own check of both."""
    g, found = torch.Generator().manual_seed(0), []
    for family, S in (
        (glb.Bernoulli(), 3.0),
        (glb.Gaussian(0.5), 2.0),
        (glb.QuasiBounded("probit"), 2.0),
    ):
        program = glb.AnchoredProgram(family, glb.Ball(2, S), (2,), anchors=6, level_tol=1e-10)
        theta = torch.tensor([1.0, 0.5], dtype=D)
        for _ in range(4):
            arms = unit(g, 2, 4, 2)
            choice = program.argmax(arms, radius=0.5, value_tol=1e-10)
            found += choice.index.tolist()
            found += choice.upper.gather(-1, choice.index[:, None]).flatten().tolist()
            x = arms[torch.arange(2), choice.index]
            program.append(x, family.sample(x @ theta, g))
        found += program.minimum().loss.tolist()
        program.self_check()
    return found


def played():
    """Rounds of policies that refit or carry an estimate."""
    arms, found = torch.tensor([[[0.9, 0.1], [0.2, 0.7]]], dtype=D), []
    for name in ("ofuglb-e", "ofulog-r", "emk", "evill", "ts", "greedy", "log-ucb-1"):
        policy = policies.make(
            name, family=glb.Bernoulli(), domain=glb.Ball(2, 2.0), batch_shape=(1,), seed=3
        )
        for t in range(4):
            index = policy.select(arms)
            policy.update(arms[0, index], torch.tensor([float(t % 2)], dtype=D))
            found += [float(index[0]), *policy.scores(arms)[0].tolist()]
    return found


def levels():
    """Two radii with a posterior."""
    g, found = torch.Generator().manual_seed(0), []
    X = unit(g, 8, 2)
    r = glb.Bernoulli().sample(X[:, 0], g)
    problem = radii.Problem(glb.Bernoulli(), glb.Ball(2, 2.0), 0.05)
    for radius in (radii.PACBayes(shapes=(0.0, 2.0)), radii.GaussianPrior()):
        state = radius.init(problem)
        for t in range(8):
            state = radius.update(problem, state, X[t : t + 1], r[t : t + 1])
            loss = glb.NegativeLogLikelihood(glb.Bernoulli(), X[: t + 1], r[: t + 1])
            level, state = radius.levels(problem, state, lambda loss=loss: loss)
        found.append(float(level[0]))
    return found


def estimates():
    """The constrained MLE: statuses and losses."""
    found = []
    for seed in range(0, 56, 5):
        problem = random_problem(seed, most_rows=25, most_features=3)
        if problem.family.compiled() is not None:
            fit = glb.constrained_mle(problem.family, problem.rows, problem.domain, throw=False)
            found += [int(fit.status), float(fit.loss)]
    return found


def forms():
    """Bounds on quadratic forms."""
    W = torch.tensor([[2.0, 0.5], [0.5, 0.25]], dtype=D)
    bounds = inverse_form_bounds(torch.eye(2, dtype=D), W, torch.linalg.cholesky(W))
    return torch.stack(bounds).flatten().tolist()


#: how many numbers there are at least, and how far they may be apart
CASES = {
    parts: (4, 0.0),
    programs: (3 * (4 * 4 + 2), 1e-8),
    played: (7 * 4 * 3, 1e-7),
    levels: (2, 1e-10),
    estimates: (12, 1e-12),
    forms: (4, 1e-14),
}


@pytest.fixture(scope="module")
def plain():
    """What the process without a compiler has found."""
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_plain_python_says_the_same(case, plain):
    count, apart = CASES[case]
    compiled = case()
    assert len(compiled) >= count
    np.testing.assert_allclose(plain[case.__name__], compiled, rtol=apart, atol=apart)


if __name__ == "__main__":
    assert not hasattr(test_parts.called, "overloads")
    print(json.dumps({case.__name__: case() for case in CASES}))
