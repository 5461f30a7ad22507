"""Fits a logistic model to 40 growing histories at once, under a norm constraint.

Prints a table as n grows and saves a picture to results/demo.png. Takes a few seconds.
"""

import math
import time
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

import torchglb as glb

matplotlib.use("Agg")
from matplotlib import pyplot as plt

REPLICATES = 40
RADIUS = 4.0
THETA = (2.4, -1.8)
SIZES = (20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
SHOWN = (20, 200, 2000)  # the sizes whose estimates are drawn in the plane
OUTPUT = Path(__file__).resolve().parent.parent / "results" / "demo.png"


def unit_vectors(n: int, generator: torch.Generator) -> Tensor:
    X = torch.randn(REPLICATES, n, 2, generator=generator, dtype=torch.float64)
    return X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)


def root_mean_square(errors: Tensor) -> Tensor:
    return errors.square().mean(-1).sqrt()


def timed_fit(
    family: glb.GLMFamily, history: glb.History, ball: glb.Ball, repeats: int = 3
) -> tuple[glb.MLEResult, float]:
    """The fit and the seconds it took: the median of a few runs, each from a cold start."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fit = glb.constrained_mle(family, history, ball)
        seconds.append(time.perf_counter() - begin)
    return fit, sorted(seconds)[repeats // 2]


def draw(errors: Tensor, predicted: list[float], estimates: dict[int, Tensor]) -> None:
    """errors: (number of sizes, REPLICATES); predicted: one root mean square error per size."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")

    for n, row in zip(SIZES, errors, strict=True):
        label = "one replicate" if n == SIZES[0] else None
        left.plot([n] * REPLICATES, row, ".", color="C0", alpha=0.3, markersize=6, label=label)
    label = f"root mean square of {REPLICATES} replicates"
    left.plot(SIZES, root_mean_square(errors), "o-", color="C0", label=label)
    label = r"large-sample prediction, $\sqrt{\mathrm{tr}\,H(\theta_*)^{-1}}$"
    left.plot(SIZES, predicted, "--", color="black", label=label)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="observations n",
        ylabel=r"error $\|\hat\theta - \theta_*\|$",
        title="The error of the constrained MLE",
    )
    left.grid(alpha=0.3)
    left.legend(loc="lower left")

    right.add_patch(plt.Circle((0, 0), RADIUS, fill=False, color="black", linewidth=1))
    for (n, theta), color in zip(estimates.items(), ("C1", "C0", "C2"), strict=True):
        right.plot(theta[:, 0], theta[:, 1], "o", color=color, alpha=0.6, label=f"n = {n}")
    right.plot(*THETA, "+", color="black", markersize=16, markeredgewidth=2, label=r"$\theta_*$")
    right.set(
        aspect="equal",
        xlim=(0, 1.1 * RADIUS),
        ylim=(-1.1 * RADIUS, 0),
        xlabel=r"$\theta_1$",
        ylabel=r"$\theta_2$",
        title=rf"The {REPLICATES} estimates, and the sphere $\|\theta\| = {RADIUS:g}$",
    )
    right.grid(alpha=0.3)
    right.legend(loc="upper left")

    OUTPUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUTPUT, dpi=120)
    plt.close(figure)


def main() -> None:
    torch.set_num_threads(1)  # steady times, also on a machine that is busy with other things
    generator = torch.Generator().manual_seed(0)
    family, ball = glb.Bernoulli(), glb.Ball(2, RADIUS)
    truth = torch.tensor(THETA, dtype=torch.float64)
    history = glb.History(dim=2, batch_shape=(REPLICATES,), family=family)
    estimates: dict[int, Tensor] = {}
    errors: list[Tensor] = []
    predicted: list[float] = []

    print(f"Logistic rewards, d = 2, theta = {THETA}, constraint |theta| <= {RADIUS:g};")
    print(f"one call fits {REPLICATES} replicates, on one thread.\n")
    print("     n      gap  relative  on sphere  error  predicted  time per problem")
    for n in SIZES:
        X = unit_vectors(n - len(history), generator)
        history.append(X, family.sample(X @ truth, generator=generator))
        fit, seconds = timed_fit(family, history, ball)

        errors.append(torch.linalg.vector_norm(fit.theta - truth, dim=-1))
        likelihood = glb.NegativeLogLikelihood.of(family, history)
        covariance = torch.linalg.inv(likelihood.expand(truth.expand(REPLICATES, 2)).hessian)
        predicted.append(math.sqrt(covariance.diagonal(dim1=-2, dim2=-1).sum(-1).mean().item()))
        if n in SHOWN:
            estimates[n] = fit.theta

        relative = (fit.gap / (1 + fit.loss.abs())).max().item()
        norm = torch.linalg.vector_norm(fit.theta, dim=-1)
        on_sphere = int((norm >= RADIUS * (1 - 1e-6)).sum())
        print(
            f"{n:>6}  {fit.gap.max().item():>7.1e}  {relative:>8.1e}  {on_sphere:>6}/{REPLICATES}"
            f"  {root_mean_square(errors[-1]).item():>5.3f}  {predicted[-1]:>9.3f}"
            f"  {1e3 * seconds / REPLICATES:>13.3f} ms",
            flush=True,
        )

    print("\ngap: the largest; each loss is at most its gap above the least loss in the ball")
    print("relative: gap / (1 + |loss|)")
    print("error: root mean square of |theta_hat - theta|; predicted: for large n, unconstrained")
    draw(torch.stack(errors), predicted, estimates)
    print(f"picture: {OUTPUT.parent.name}/{OUTPUT.name}")


if __name__ == "__main__":
    main()
