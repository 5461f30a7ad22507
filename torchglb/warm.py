"""Compiles what most programs need and leaves it in the cache: ``python -m torchglb.warm``.

Numba compiles a function when it is first called. One small round of the exact program, of the
estimates and of a likelihood-ratio interval calls nearly all of them. The two halves are compiled
by two processes at a time, since a process compiles on one core.
"""

from __future__ import annotations

import subprocess
import sys
import time


def play(*names: str) -> None:
    """Four rounds of some policies, with bounds beside them."""
    import torch

    from torchglb.domain import Ball
    from torchglb.families import Bernoulli
    from torchglb.policies import make

    arms = 0.9 * torch.eye(2, dtype=torch.float64)
    for name in names:
        policy = make(name, family=Bernoulli(), domain=Ball(2, 2.0), batch_shape=(2,))
        tracker = policy.tracker()
        for _ in range(4):
            index = policy.select(arms.expand(2, 2, 2))
            tracker.bounds(arms[index])
            policy.update(arms[index], torch.ones(2, dtype=torch.float64))


def solve() -> None:
    """An estimate, and the bounds of two arms from scratch."""
    import torch

    from torchglb.domain import Ball
    from torchglb.families import Bernoulli
    from torchglb.history import Rows
    from torchglb.likelihood import NegativeLogLikelihood
    from torchglb.mle import constrained_mle
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


def warm() -> None:
    """Calls every compiled function that a bandit, a fit and an interval need."""
    warm_rounds()
    warm_estimates()
    play("ofuglb-pb", "emk")


def main() -> int:
    """Warms the cache and says how long it took."""
    began = time.perf_counter()
    if sys.argv[1:] == ["estimates"]:
        warm_estimates()
        return 0
    with subprocess.Popen([sys.executable, "-m", "torchglb.warm", "estimates"]) as other:
        warm_rounds()
        other.wait()
    warm()
    sys.stderr.write(f"torchglb: kernels ready after {time.perf_counter() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
