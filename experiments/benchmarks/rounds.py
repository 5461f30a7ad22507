"""How often a round of exact optimism reads the history: passes per round, and time.

OFUGLB on the paper's time-varying logistic bandit (K = 20). A pass is the evaluation of loss,
gradient and Hessian at one point, over all n rows. ``minimum`` counts the passes that certify the
level B to 1e-6, ``arms`` those that make the winner certain.
"""

import time

import torch
from benchmarks._bandit import Bandit, radius

SETTINGS = tuple((d, S) for d in (2, 5, 10) for S in (4.0, 10.0))
BARS = {2: 0.3, 10: 3.0}


def run(quick: bool, device: str = "cpu") -> None:
    horizon, start, replicates = (200, 100, 2) if quick else (2000, 500, 4)
    torch.set_num_threads(1)
    print(f"rounds {start} to {horizon}, {replicates} replicates, K = 20, level to 1e-6")
    print(f"{'d':>3} {'S':>4} {'minimum':>9} {'arms':>7} {'in all':>7} {'ms per round':>13}")
    for d, S in SETTINGS:
        bandit = Bandit(d, S, replicates, device=device)
        spent = {"minimum": 0.0, "all": 0.0}
        clock = 0.0
        while bandit.t <= horizon:
            arms = bandit.arms()
            before, began = bandit.program.passes, time.perf_counter()
            minimum = bandit.program.minimum()
            middle = bandit.program.passes
            choice = bandit.program.argmax(arms, radius(bandit.t, d, S), minimum=minimum)
            choice.index.tolist()  # until the device has decided
            seconds = time.perf_counter() - began
            if bandit.t >= start:
                spent["minimum"] += float((middle - before).mean())
                spent["all"] += float((bandit.program.passes - before).mean())
                clock += seconds
            bandit.learn(arms[torch.arange(replicates, device=device), choice.index])
        count = horizon - start + 1
        least, total = spent["minimum"] / count, spent["all"] / count
        row = f"{d:>3} {S:>4g} {least:>9.3f} {total - least:>7.3f} {total:>7.3f}"
        print(f"{row} {1e3 * clock / count:>13.2f}")
        if d in BARS and not quick:
            verdict = "met" if total <= BARS[d] else "MISSED"
            print(f"    bar: at most {BARS[d]:g} passes per round at d = {d}: {verdict}")
