"""What a row costs a contrast sequence at d = 20, and a table of all coefficients of many rows.

    python experiments/contrast_speed.py [--quick] [--rows 1000000]

Per row: the weights of one contrast beside the same in NumPy; an update of the whole sequence with
rows in blocks and one at a time. The joint set and the weights take in new rows at a look, many at
a time: that is measured here with every block, and with every hundred single rows. Then m = d
coefficients of logistic rows: seconds of processor time, and on Linux the largest memory of the
process, in units of the rows as they were given.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import torchglb as glb
from torchglb.contrasts.weights import WeighedRows

DELTA, S, DIM = 0.05, 4.0, 20
BLOCK = 10_000


def rows_of(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logistic rows of length at most 1."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, DIM))
    length = np.sqrt(np.einsum("ij,ij->i", X, X))  # without a copy, whose memory would be counted
    X *= (rng.uniform(size=n) ** (1 / DIM) / length)[:, None]
    z = X @ np.full(DIM, (S - 1) / DIM**0.5)
    return X, (rng.uniform(size=n) < 1.0 / (1.0 + np.exp(-z))).astype(float)


def sequence(contrasts: int) -> glb.ContrastSequence:
    return glb.ContrastSequence(glb.Bernoulli(), glb.Ball(DIM, S), np.eye(DIM)[:contrasts], DELTA)


def numpy_weights(X: np.ndarray, r: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What the kernel does, in NumPy."""
    inverse, guess, b = np.eye(len(c)), np.zeros(len(c)), np.zeros(len(X))
    for s in range(len(X)):
        step = inverse @ X[s]
        b[s] = (step @ c) / (c @ inverse @ c)
        mean = 1.0 / (1.0 + np.exp(-(X[s] @ guess)))
        curvature = max(mean * (1.0 - mean), 0.02)
        grow = 1.0 + curvature * (X[s] @ step)
        guess += step * ((r[s] - mean) / grow)
        guess *= min(1.0, S / float(np.sqrt(guess @ guess)))
        inverse -= np.outer(step, step) * (curvature / grow)
    return b


def microseconds(run: Callable[[], object], rows: int) -> float:
    """Of processor time, whatever else the machine does."""
    start = time.process_time()
    run()
    return 1e6 * (time.process_time() - start) / rows


def each_row(n: int) -> None:
    """Prints the time per row; medians, after what is compiled has been compiled."""
    X, r = rows_of(n, seed=1)
    c = np.eye(DIM)[:1]
    rows = WeighedRows(glb.NegativeLogLikelihood(glb.Bernoulli(), X, r), c, S)

    def weigh() -> np.ndarray:
        return np.concatenate([block.b.numpy() for block in rows.blocks()])

    same = np.abs(weigh()[:, 0] - numpy_weights(X, r, c[0])).max()
    weights = statistics.median(microseconds(weigh, n) for _ in range(5))
    plain = statistics.median(microseconds(lambda: numpy_weights(X, r, c[0]), n) for _ in range(3))
    print(f"weights of one contrast {weights:.2f} us, in NumPy {plain:.1f} us", end="")
    print(f" ({plain / weights:.0f} times as long; they differ by {same:.0e})")
    in_blocks, alone = sequence(1), sequence(1)
    alone.update(X[0], r[0])
    block = min(BLOCK, n)

    def a_block() -> None:
        in_blocks.update(X[:block], r[:block])
        in_blocks.joint.sums()  # shows the joint set its rows

    blocks = statistics.median(microseconds(a_block, block) for _ in range(5))
    print(f"update in blocks of {block} rows {blocks:.1f} us per row", end="")
    print(f", with the weights {blocks + weights:.1f} (at most 20 asked)")

    def some(first: int) -> None:
        for x, reward in zip(X[first : first + 100], r[first : first + 100], strict=True):
            alone.update(x, reward)
        alone.joint.sums()

    single = [microseconds(partial(some, first), 100) for first in range(0, n - 99, 100)]
    middle = statistics.median(single)
    print(f"update of a single row {middle:.1f} us (least {min(single):.1f})", end="")
    print(f", with the weights {middle + weights:.1f} (at most 20 asked)")


class Memory:
    """Of this process, as Linux counts it; nothing elsewhere."""

    def __init__(self) -> None:
        self.before = self.now()
        self.forget()

    def now(self, name: str = "VmRSS") -> int:
        """Bytes."""
        status = Path("/proc/self/status")
        lines = status.read_text().splitlines() if status.exists() else []
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

    def forget(self) -> None:
        """The largest memory so far is the present one."""
        if (door := Path("/proc/self/clear_refs")).exists():
            door.write_text("5")

    def most(self) -> int:
        """The largest since then, beyond what there was at the beginning."""
        return self.now("VmHWM") - self.before


def table(n: int) -> tuple[float, float, float]:
    """All coefficients of n rows: how long, and how much memory, as multiples of the rows.

    Returns:
        The most while rows came, what is kept after that, the most during a look.
    """
    warm = sequence(DIM)
    warm.update(*rows_of(300, seed=3))
    warm.current()  # compiled code and its libraries are there
    X, r = rows_of(n, seed=2)
    given, found = X.nbytes + r.nbytes, sequence(DIM)
    memory, start = Memory(), time.process_time()
    for first in range(0, n, BLOCK):
        found.update(X[first : first + BLOCK], r[first : first + BLOCK])
    updated, most, kept = time.process_time(), memory.most(), memory.now() - memory.before
    memory.forget()
    lower, upper = found.current()
    looked = memory.most()
    width = 0.5 * float((upper - lower).mean())
    print(f"{DIM} coefficients of {n} rows: updates {updated - start:.1f} s, the look", end="")
    print(f" {time.process_time() - updated:.1f} s; half width {width:.4f} in the mean")
    times = (most / given, kept / given, looked / given)
    print(f"  memory in units of the rows: {times[0]:.2f} while they come", end="")
    print(f", {times[1]:.2f} then, {times[2]:.2f} during a look")
    return times


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rows, for a test")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    options = parser.parse_args(arguments)
    each_row(300 if options.quick else 20_000)
    table(500 if options.quick else options.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
