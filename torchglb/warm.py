"""Compiles what most programs need and leaves it in the cache: ``python -m torchglb.warm``.

Numba compiles a function when it is first called. One small round of the exact program, of the
estimate and of a likelihood-ratio interval calls nearly all of them.
"""

from __future__ import annotations

import sys
import time


def warm() -> None:
    """Calls every compiled function that a bandit, a fit and an interval need."""
    import torch

    from torchglb.domain import Ball
    from torchglb.families import Bernoulli
    from torchglb.history import Rows
    from torchglb.likelihood import NegativeLogLikelihood
    from torchglb.mle import constrained_mle
    from torchglb.policies import make
    from torchglb.ucb import SublevelProgram, support

    family, ball = Bernoulli(), Ball(2, 2.0)
    arms = 0.9 * torch.eye(2, dtype=torch.float64)
    for name in ("ofuglb", "ofuglb-pb", "ofuglb-e", "emk", "evill"):
        policy = make(name, family=family, domain=ball, batch_shape=(2,))
        tracker = policy.tracker()
        for _ in range(4):
            both = arms.expand(2, 2, 2)
            index = policy.select(both)
            tracker.bounds(arms[index])
            policy.update(arms[index], torch.ones(2, dtype=torch.float64))
    rows = Rows(arms, torch.tensor([1.0, 0.0], dtype=torch.float64))
    fit = constrained_mle(family, rows, ball)
    program = SublevelProgram(NegativeLogLikelihood(family, *rows), ball, fit.loss + 1.0)
    support(program, arms)


def main() -> int:
    """Warms the cache and says how long it took."""
    began = time.perf_counter()
    warm()
    sys.stderr.write(f"torchglb: kernels ready after {time.perf_counter() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
