"""Gradients of the UCB value: ours against cvxpylayers.

``d h / d features`` of logistic programs with d = 2, S = 4, one arm each. The reference is a
central difference of the value, extrapolated (Richardson) from programs solved to a gap of about
1e-13. Ours solves a batch of 256 programs at once and is shown per program; cvxpylayers takes them
one by one.
"""

import time
import warnings

import cvxpy as cp
import torch
from benchmarks._bandit import FAMILY, draw_arms
from cvxpylayers.torch import CvxpyLayer
from torch import Tensor

import torchglb as glb

S, BATCH = 4.0, 256


def value(X: Tensor, r: Tensor, level: Tensor, arms: Tensor, tol: float | None = None) -> Tensor:
    loss = glb.NegativeLogLikelihood(FAMILY, X, r)
    program = glb.SublevelProgram(loss, glb.Ball(2, S), level)
    return glb.support(program, arms, tol=tol, throw=False).lower[..., 0]


def reference(
    X: Tensor, r: Tensor, level: Tensor, arm: Tensor, places: list[tuple[int, int]]
) -> Tensor:
    """Partial derivatives of the value at some entries of the features of one program."""
    steps = torch.tensor([1e-3, -1e-3, 5e-4, -5e-4, 2.5e-4, -2.5e-4], dtype=torch.float64)
    copies = X.repeat(len(places) * 6, 1, 1)
    for k, (row, column) in enumerate(places):
        copies[6 * k : 6 * k + 6, row, column] += steps
    count = len(copies)
    h = value(
        copies, r.expand(count, -1), level.expand(count), arm.expand(count, 1, 2), tol=1e-13
    ).reshape(-1, 3, 2)
    slope = (h[..., 0] - h[..., 1]) / (2.0 * torch.tensor([1e-3, 5e-4, 2.5e-4]).double())
    once = (4.0 * slope[:, 1:] - slope[:, :-1]) / 3.0
    return (16.0 * once[:, 1] - once[:, 0]) / 15.0


def peer_layer(n: int) -> CvxpyLayer:
    theta, u = cp.Variable(2), cp.Variable(n)
    X, b, level, arm = cp.Parameter((n, 2)), cp.Parameter(2), cp.Parameter(), cp.Parameter(2)
    constraints = [cp.logistic(X @ theta) <= u, cp.sum(u) - b @ theta <= level, cp.norm(theta) <= S]
    problem = cp.Problem(cp.Maximize(arm @ theta), constraints)
    return CvxpyLayer(problem, parameters=[X, b, level, arm], variables=[theta])


def run(quick: bool) -> None:
    torch.set_num_threads(1)
    print(__doc__)
    print(f"{'n':>5} {'method':<14} {'ms per program':>15} {'relative error':>15}")
    for n in (20,) if quick else (20, 100, 500):
        generator = torch.Generator().manual_seed(n)
        X = torch.nn.functional.normalize(draw_arms(generator, BATCH, n, 2), dim=-1)
        r = FAMILY.sample(X @ torch.tensor([1.0, 1.0]).double(), generator)
        arms = torch.nn.functional.normalize(draw_arms(generator, BATCH, 1, 2), dim=-1)
        fit = glb.constrained_mle(FAMILY, glb.Rows(X, r), glb.Ball(2, S))
        level = fit.loss + 1.0
        places = [(i, j) for i in range(0, n, max(1, n // 10)) for j in (0, 1)]
        truth = reference(X[0], r[0], level[0], arms[0], places)

        def ours(
            X: Tensor = X, r: Tensor = r, level: Tensor = level, arms: Tensor = arms
        ) -> Tensor:
            features = X.clone().requires_grad_()
            h = value(features, r, level, arms)
            return torch.autograd.grad(h.sum(), features)[0]

        ours()
        times = []
        for _ in range(15):
            began = time.process_time()
            gradient = ours()
            times.append((time.process_time() - began) / BATCH)
        layer = peer_layer(n)

        def peer(
            layer: CvxpyLayer = layer,
            X: Tensor = X,
            r: Tensor = r,
            level: Tensor = level,
            arms: Tensor = arms,
        ) -> Tensor:
            features = X[0].clone().requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (theta,) = layer(
                    features,
                    features.mT @ r[0],
                    level[0],
                    arms[0, 0],
                    solver_args={"solve_method": "CLARABEL"},
                )
                return torch.autograd.grad(theta @ arms[0, 0], features)[0]

        peer()
        peer_times = []
        for _ in range(7):
            began = time.process_time()
            peer_gradient = peer()
            peer_times.append(time.process_time() - began)
        rows, columns = (list(index) for index in zip(*places, strict=True))

        def error(
            found: Tensor,
            rows: list[int] = rows,
            columns: list[int] = columns,
            truth: Tensor = truth,
        ) -> float:
            return float((found[rows, columns] - truth).norm() / truth.norm())

        mine, theirs = error(gradient[0]), error(peer_gradient)
        print(f"{n:>5} {'cvxpylayers':<14} {1e3 * min(peer_times):>15.3f} {theirs:>15.1e}")
        print(f"{n:>5} {'ours':<14} {1e3 * min(times):>15.3f} {mine:>15.1e}")
        ratio = min(peer_times) / min(times)
        verdict = "met" if ratio >= 100 and mine <= 1e-7 else "MISSED"
        print(f"      bar: error at most 1e-7 and 100 times faster: {ratio:.0f} times, {verdict}")
