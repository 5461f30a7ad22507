"""How long a large leaderboard takes, and the widest of many pairs.

    python experiments/pairs_speed.py [--quick] [--models 200] [--battles 1000000] [--items 1000]

A file of battles goes through `torchglb leaderboard` in a process of its own: seconds, largest
memory, and how far the scores are from an unpenalised Bradley-Terry fit by SciPy. Then the pair
that is known least, of all pairs of items, after 60 and after 2000 comparisons.
"""

import argparse
import csv
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import scipy.optimize
import torch

import torchglb as glb


def draw(models: int, battles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random pairs, left, right, and whether the left one won."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=models)
    a = generator.integers(0, models, battles)
    b = (a + generator.integers(1, models, battles)) % models
    won = generator.random(battles) < 1.0 / (1.0 + np.exp(scores[b] - scores[a]))
    return a, b, won.astype(float)


def by_scipy(models: int, a: np.ndarray, b: np.ndarray, won: np.ndarray) -> np.ndarray:
    """Scores of the unpenalised fit, which add up to 0: Newton's method on all battles."""
    pairs, place = np.unique(a * models + b, return_inverse=True)
    number, wins = np.bincount(place), np.bincount(place, won)
    left, right = pairs // models, pairs % models

    def chance(s: np.ndarray) -> np.ndarray:
        return 1.0 / (1.0 + np.exp(s[right] - s[left]))

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        s = np.append(free, 0.0)
        z = s[left] - s[right]
        off = number * chance(s) - wins
        slope = np.bincount(left, off, models) - np.bincount(right, off, models)
        return float(number @ np.logaddexp(0.0, z) - wins @ z), slope[:-1]

    def curvature(free: np.ndarray) -> np.ndarray:
        p = chance(np.append(free, 0.0))
        H = np.zeros((models, models))
        for i, j, sign in (
            (left, left, 1),
            (right, right, 1),
            (left, right, -1),
            (right, left, -1),
        ):
            np.add.at(H, (i, j), sign * number * p * (1.0 - p))
        return H[:-1, :-1]

    start, options = np.zeros(models - 1), {"gtol": 1e-7}
    found = scipy.optimize.minimize(
        loss, start, jac=True, hess=curvature, method="trust-exact", options=options
    )
    s = np.append(found.x, 0.0)
    return s - s.mean()


def large_leaderboard(models: int, battles: int) -> None:
    a, b, won = draw(models, battles)
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "battles.csv", Path(folder) / "board"
        with path.open("w", encoding="utf-8") as file:
            file.write("model_a,model_b,winner\n")
            names = ("model_b", "model_a")
            file.writelines(
                f"m{i},m{j},{names[int(w)]}\n" for i, j, w in zip(a, b, won, strict=True)
            )
        command = [sys.executable, "-m", "torchglb", "leaderboard", str(path), "--out", str(out)]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        with (out / "leaderboard.csv").open(encoding="utf-8") as file:
            scores = {row["name"]: float(row["score"]) for row in csv.DictReader(file)}
    mine = np.array([scores[f"m{i}"] for i in range(models)])
    apart = np.abs(mine - by_scipy(models, a, b, won)).max()
    print(f"{models} models, {battles} battles: {seconds:.1f} s", end="")
    print(
        f" ({used.ru_utime + used.ru_stime:.1f} s of CPU), {used.ru_maxrss / 2**20:.2f} GB;", end=""
    )
    print(f" scores within {apart:.0e} of SciPy's")


def widest(items: int, dim: int = 5) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(items, dim, generator=generator, dtype=torch.float64)
    points /= torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    log = glb.PreferenceSequence(dim=dim, S=3.0, delta=0.05)
    for rows in (60, 1940):
        i, j = torch.randint(0, items, (2, rows), generator=generator)
        chance = torch.sigmoid(2.0 * (points[i, 0] - points[j, 0]))
        won = (torch.rand(rows, generator=generator, dtype=torch.float64) < chance).double()
        log.update(points[i], points[j], won)
        region = log.current()
        region.widest(points[:50])  # compiled
        start = time.perf_counter()
        found = region.widest(points)[0]
        print(
            f"the widest of {items} items' pairs after {len(log)} comparisons, d = {dim}:"
            f" {time.perf_counter() - start:.2f} s; {found}"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small, for a test")
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--battles", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=1000)
    given = parser.parse_args(arguments)
    if given.quick:
        given.models, given.battles, given.items = 5, 500, 60
    large_leaderboard(given.models, given.battles)
    widest(given.items)
    return 0


if __name__ == "__main__":
    sys.exit(main())
