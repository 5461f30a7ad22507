"""What float32 costs in accuracy: measured over the tests' problems, and bounded.

``python tests/test_float32.py`` prints the table of ``docs/float32.md``. Both precisions get the same
rows, rounded to float32, so that only the arithmetic differs.

- Estimates: the excess of the loss, ``(L(theta_32) - L(theta_64)) / (1 + |L|)``, in float64; and the
  distance ``|theta_32 - theta_64| / S`` where the data determine theta: where the loss bends by at
  least ``0.1 (1 + |L|) / S^2`` in every direction (along the sphere, if theta is on it).
- Upper confidence bounds: ``(upper_32 - upper_64) / (S |x|)``, where the level is at least ``1e-3 (1 +
  |L|)`` above the minimum; a level closer than that is not resolved in float32.
"""

from __future__ import annotations

import torch
from problems import Problem, random_problem
from programs import Case, random_program

import torchglb as glb

#: twice the largest of 112 problems and 192 programs (6.0e-5, 1.5e-2, 1.1e-3), to one digit upwards
EXCESS, DISTANCE, BOUND = 2e-4, 3e-2, 3e-3


def fits(problem: Problem) -> tuple[glb.MLEResult, glb.MLEResult, glb.NegativeLogLikelihood]:
    """The estimates in float64 and in float32, and the loss in float64."""
    X, r, w = (None if t is None else t.float() for t in problem.rows)
    narrow = glb.constrained_mle(problem.family, glb.Rows(X, r, w), problem.domain, throw=False)
    rows = glb.Rows(X.double(), r.double(), None if w is None else w.double())
    wide = glb.constrained_mle(problem.family, rows, problem.domain, throw=False)
    return wide, narrow, glb.NegativeLogLikelihood(problem.family, *rows)


def is_determined(wide: glb.MLEResult, S: float) -> bool:
    """Whether the data determine theta: inside, or on a sphere that holds it back with force."""
    theta, d = wide.theta, wide.theta.shape[-1]
    least = 0.1 * (1 + abs(float(wide.loss))) / S**2
    nu, hessian = float(-(wide.gradient @ theta)) / S**2, wide.hessian
    if nu >= least:
        if d == 1:
            return True
        basis = torch.linalg.qr(torch.cat([theta[:, None], torch.eye(d).double()], -1))[0][:, 1:d]
        hessian = basis.mT @ (hessian + nu * torch.eye(d).double()) @ basis
    return float(torch.linalg.eigvalsh(hessian)[0]) >= least


def excess_and_distance(problem: Problem) -> tuple[float, float | None]:
    """How much loss float32 leaves, and how far off theta is where that means something."""
    wide, narrow, loss = fits(problem)
    theta = narrow.theta.double()
    theta = theta * min(1.0, problem.radius / max(float(theta.norm()), 1e-300))
    size = 1 + abs(float(wide.loss))
    excess = float(loss(theta) - wide.loss) / size
    distance = float((theta - wide.theta).norm()) / problem.radius
    return excess, distance if is_determined(wide, problem.radius) else None


def bound_deviations(case: Case) -> torch.Tensor | None:
    """``(upper_32 - upper_64) / (S |x|)`` of every arm but zero; None for an unresolved level."""
    loss, arms = case.program.likelihood, case.arms.float()
    X, r, w = (None if t is None else t.float() for t in (loss.X, loss.r, loss.w))
    level = case.program.level.float()
    beta2 = float(level) - case.minimum
    if beta2 < 1e-3 * (1 + abs(case.minimum)):
        return None
    narrow = glb.NegativeLogLikelihood(
        loss.family, X, r, w, regularization=float(loss.regularization)
    )
    wide = glb.NegativeLogLikelihood(
        loss.family,
        X.double(),
        r.double(),
        None if w is None else w.double(),
        regularization=float(loss.regularization),
    )
    domain = case.program.domain
    few = glb.support(glb.SublevelProgram(narrow, domain, level), arms, throw=False)
    many = glb.support(
        glb.SublevelProgram(wide, domain, level.double()), arms.double(), throw=False
    )
    length = case.radius * arms.double().norm(dim=-1)
    return ((few.upper.double() - many.upper) / length)[length > 0]


def problems(count: int) -> list[Problem]:
    return [random_problem(seed, most_rows=1000, most_features=20) for seed in range(count)]


def cases(count: int) -> list[Case]:
    return [random_program(seed, max_n=500, max_d=8) for seed in range(count)]


def test_estimates():
    found = [excess_and_distance(problem) for problem in problems(56)]
    distances = [distance for _, distance in found if distance is not None]
    assert len(distances) >= 15
    assert max(excess for excess, _ in found) <= EXCESS
    assert max(distances) <= DISTANCE


def test_upper_bounds():
    found = [part for part in map(bound_deviations, cases(96)) if part is not None]
    assert len(found) >= 60
    deviations = torch.cat(found)
    assert float(deviations.max()) <= BOUND
    assert float(deviations.min()) >= 0.0  # looser, never wrong


if __name__ == "__main__":
    import collections

    table = collections.defaultdict(list)
    for problem in problems(112):
        excess, distance = excess_and_distance(problem)
        table[problem.name.split("-")[1]].append((excess, distance, problem.name))
    print(f"{'estimates':16} {'excess':>9} {'distance':>9} determined")
    for kind, rows in table.items():
        known = [distance for _, distance, _ in rows if distance is not None]
        worst = f"{max(known):9.1e}" if known else 9 * " "
        print(f"{kind:16} {max(row[0] for row in rows):9.1e} {worst} {len(known):>3}/{len(rows)}")
    table = collections.defaultdict(list)
    for case in cases(192):
        found = bound_deviations(case)
        if found is not None and len(found):
            kind, family, place = case.name.split("-")[1:4]
            table[family, place].append((float(found.min()), float(found.max()), case.name))
    print(f"\n{'bounds':20} {'lowest':>9} {'highest':>9} programs")
    for (family, place), rows in sorted(table.items()):
        low, high = min(rows), max(rows, key=lambda row: row[1])
        print(f"{family:10}{place:10} {low[0]:9.1e} {high[1]:9.1e} {len(rows):>3}   {high[2]}")
