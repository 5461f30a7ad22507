"""What a sweep beyond one machine costs: CPU seconds per replicate-round, and what travels.

    python experiments/sweep_cost.py [--preset figure1] [--horizon 2000] [--settings 100]

Two worker processes play a preset with few replicates; their CPU time is measured, not the clock,
so that other programs on the machine do not count. Rounds become slower as the history grows: two
runs, to T/2 and to T, give the time of a round late in a run, and the preset's own horizon is
extrapolated with that growth (linear in t).
"""

from __future__ import annotations

import argparse
import pickle
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchglb.report.tables import aligned
from torchglb.simulate import Configuration, find_preset, lay_over, read_table, run
from torchglb.simulate.runner import Task

REPLICATES = 4


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(table: dict[str, Any], label: str, horizon: int) -> tuple[float, int, int, int]:
    """CPU seconds of a policy; bytes of a task, of its last state and of its results."""
    shrunk = lay_over(table, {"horizon": horizon, "replicates": REPLICATES, "policies": [label]})
    shrunk["policy"] = {k: v for k, v in table.get("policy", {}).items() if k == label}
    shrunk["chunk"] = len(shrunk["S"]) * REPLICATES // 2  # two tasks for two workers
    config = Configuration.load(shrunk)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        before = cpu_seconds()
        run(config, out, executor="processes", workers=2)
        seconds = cpu_seconds() - before
        sent = len(pickle.dumps(Task(name, config.as_dict(), label, 0, 20.0, "0" * 64)))
        state = sum(path.stat().st_size for path in (out / "states").iterdir())
        result = (out / f"{label}.npz").stat().st_size
    return seconds, sent, state, result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="figure1")
    parser.add_argument("--horizon", type=int, default=2000)
    parser.add_argument("--policies", help="labels, separated by commas; all by default")
    parser.add_argument("--settings", type=int, default=100)
    parser.add_argument("--cores", type=int, default=1000)
    given = parser.parse_args()
    table = read_table(find_preset(given.preset))
    full = Configuration.load(table)
    T, h = full.horizon, given.horizon
    played = len(full.S) * REPLICATES
    start, *_ = measure(table, "random", 1)  # two interpreters that import torch
    rows = [
        [
            "policy",
            "replicate-rounds/s",
            f"at t = {h}",
            f"CPU h, T = {T}",
            "task kB",
            "state kB",
            "result kB",
        ]
    ]
    hours = travels = 0.0
    for label in given.policies.split(",") if given.policies else full.policy:
        half, *_ = measure(table, label, h // 2)
        whole, sent, state, result = measure(table, label, h)
        # seconds of one replicate-round, a + b t, from the sums to h/2 and to h
        first, second = (half - start) / played, (whole - start) / played
        b = max(4 * (second - 2 * first) / h**2, 0.0)
        a = max(second / h - b * h / 2, 1e-9)
        seconds = full.elements * (a * T + b * T**2 / 2)
        scale = full.elements / played * T / h
        rows.append(
            [
                label,
                f"{h / second:.0f}",
                f"{1 / (a + b * h):.0f}",
                f"{seconds / 3600:.2f}",
                f"{sent / 1e3:.1f}",
                f"{state * scale / 1e3:.0f}",
                f"{result * full.elements / played * min(T, 1000) / min(h, 1000) / 1e3:.0f}",
            ]
        )
        hours += seconds / 3600
        travels += (sent + result * full.elements / played) / 1e6
        print(f"{label}: {whole:.1f} CPU s", file=sys.stderr)
    print("\n".join(aligned(rows)))
    total = given.settings * hours
    cost = f"{total:.0f} CPU hours, {total / given.cores:.2f} h on {given.cores} cores"
    print(f"\n{given.settings} settings: {cost} if no core ever waits")
    print(f"tasks and results: {given.settings * travels:.0f} MB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
