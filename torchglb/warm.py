"""Compiles what most programs need and leaves it in the cache: ``python -m torchglb.warm``.

Numba compiles a function when it is first called. One small round of the exact program, of the
estimates and of a likelihood-ratio interval calls nearly all of them. The two halves are compiled
by two processes at a time, since a process compiles on one core. ``--all`` goes on with what fewer
programs need: rows in float32, families of one's own, bounds of fixed arms.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchglb.families import GLMFamily


def play(*names: str, family: GLMFamily | None = None, single: bool = False) -> None:
    """Four rounds of some policies, with bounds beside them."""
    import torch

    from torchglb.domain import Ball
    from torchglb.families import Bernoulli
    from torchglb.policies import make

    dtype = torch.float32 if single else torch.float64
    arms = 0.9 * torch.eye(2, dtype=dtype)
    for name in names:
        policy = make(
            name, family=family or Bernoulli(), domain=Ball(2, 2.0), batch_shape=(2,), dtype=dtype
        )
        tracker = policy.tracker()
        for _ in range(4):
            index = policy.select(arms.expand(2, 2, 2))
            tracker.bounds(arms[index])
            policy.update(arms[index], torch.ones(2, dtype=dtype))


def solve() -> None:
    """An estimate, and the bounds of two arms from scratch."""
    import torch

    from torchglb.domain import Ball
    from torchglb.families import Bernoulli
    from torchglb.likelihood import NegativeLogLikelihood
    from torchglb.mle import constrained_mle
    from torchglb.rows.buffers import Rows
    from torchglb.ucb import SublevelProgram, support

    family, ball, arms = Bernoulli(), Ball(2, 2.0), 0.9 * torch.eye(2, dtype=torch.float64)
    rows = Rows(arms, torch.tensor([1.0, 0.0], dtype=torch.float64))
    fit = constrained_mle(family, rows, ball)
    program = SublevelProgram(NegativeLogLikelihood(family, *rows), ball, fit.loss + 1.0)
    support(program, arms)


def intervals() -> None:
    """Levels of a posterior, around an estimate that is found anew."""
    import torch

    from torchglb.domain import Ball
    from torchglb.families import Bernoulli
    from torchglb.sequence import ConfidenceSequence

    sequence = ConfidenceSequence(Bernoulli(), Ball(2, 2.0), 0.05, "pac-bayes", batch_shape=(2,))
    arms = 0.9 * torch.eye(2, dtype=torch.float64)
    for _ in range(3):
        sequence.update(arms, torch.ones(2, dtype=torch.float64))
        sequence.current()


def warm_estimates() -> None:
    """All that needs no exact round."""
    solve()
    intervals()


def warm_rounds() -> None:
    """The exact round, and policies that refit."""
    play("ofuglb", "ofuglb-e", "evill")


def warm_single() -> None:
    """Rows in float32."""
    play("ofuglb", "ofuglb-e", "evill", single=True)


def warm_own() -> None:
    """A family whose formulas are not compiled; the bounds of arms that stay."""
    import torch

    from torchglb.families import CustomFamily, Gaussian

    family = CustomFamily(
        torch.nn.functional.softplus,
        reward_range=(0.0, 1.0),
        self_concordance=1.0,
        max_variance=0.25,
    )
    play("ofuglb", "ofuglb-e", "evill", family=family)
    play("ofuglb-contrast")
    play("ofuglb-contrast", single=True)
    play("oful-contrast", family=Gaussian(0.5))


PARTS = {"estimates": warm_estimates, "own": warm_own}


def warm() -> None:
    """Calls every compiled function that a bandit, a fit and an interval need."""
    warm_rounds()
    warm_estimates()
    play("ofuglb-pb", "emk")


def beside(part: str) -> subprocess.Popen[bytes]:
    """A process that compiles a part; as a context, it is waited for."""
    return subprocess.Popen([sys.executable, "-m", "torchglb.warm", part])


def main() -> int:
    """Warms the cache and says how long it took."""
    parser = argparse.ArgumentParser(description="Compiles ahead of time.")
    parser.add_argument("part", nargs="?", choices=PARTS, help="only this part")
    parser.add_argument("--all", action="store_true", help="float32 and families of one's own, too")
    given = parser.parse_args()
    began = time.perf_counter()
    if given.part is not None:
        PARTS[given.part]()
        return 0
    with beside("estimates"):
        warm_rounds()
    warm()
    if given.all:
        with beside("own"):
            warm_single()
    sys.stderr.write(f"torchglb: kernels ready after {time.perf_counter() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
