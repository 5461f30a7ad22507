"""Operator calls per round of the exact program on a device, where each one is a launch.

Counted on the CPU with a family that hides its compiled derivatives, so that the program takes the
way of a device with real numbers of steps: one fit from the last estimate, one solve of all arms.
"""

import statistics
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchglb as glb
from torchglb.ucb import RefitProgram

S, K = 4.0, 20


class ByTorch(glb.Bernoulli):
    """Without compiled derivatives, as on a device."""

    def compiled(self) -> None:
        return None


class Counter(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def launches(d: int, rounds: int, *, fixed: bool) -> float:
    """The median of the later half of the rounds."""
    generator = torch.Generator().manual_seed(d)
    program, counts = RefitProgram(ByTorch(), glb.Ball(d, S), (4,)), []
    theta = torch.nn.functional.normalize(torch.randn(d, generator=generator).double(), dim=0)
    arms = torch.empty(0)
    for t in range(rounds):
        if not fixed or t == 0:
            x = torch.randn(4, K, d, generator=generator, dtype=torch.float64)
            arms = torch.nn.functional.normalize(x, dim=-1)
        with Counter() as counter:
            choice = program.argmax(arms, 2.0)
        counts.append(counter.calls)
        x = arms[torch.arange(4), choice.index]
        program.append(x, torch.bernoulli(torch.sigmoid(x @ (2.0 * theta)), generator=generator))
    return statistics.median(counts[rounds // 2 :])


def run(quick: bool) -> None:
    print(__doc__)
    print(f"{'d':>3} {'arms':>6} {'calls per round':>16}")
    for d in (2,) if quick else (2, 5, 10):
        for fixed in (False, True):
            calls = launches(d, 40, fixed=fixed)
            print(f"{d:>3} {'fixed' if fixed else 'fresh':>6} {calls:>16.0f}")
