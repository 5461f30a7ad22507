"""A logistic bandit as in the paper, for benchmarks: random arms, optimistic choices."""

import math
from typing import Any

import torch
from torch import Tensor

import torchglb as glb

FAMILY = glb.Bernoulli()
DELTA = 0.05


def radius(t: int, d: int, S: float) -> float:
    """Theorem 3.1 with Table 1: beta^2 before round t."""
    lipschitz = (1.0 + S / 2.0) * (t - 1)
    return math.log(1.0 / DELTA) + d * math.log(max(math.e, 2.0 * math.e * S * lipschitz / d))


def draw_arms(generator: torch.Generator, *shape: int) -> Tensor:
    """Arms uniform in the unit ball; the last axis is d."""
    options: dict[str, Any] = {
        "generator": generator,
        "dtype": torch.float64,
        "device": generator.device,
    }
    x = torch.nn.functional.normalize(torch.randn(shape, **options), dim=-1)
    return x * torch.rand(*shape[:-1], 1, **options) ** (1 / shape[-1])


class Bandit:
    """Replicates of the paper's time-varying logistic bandit, played by exact optimism."""

    def __init__(
        self,
        d: int,
        S: float,
        replicates: int,
        K: int = 20,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.d, self.S, self.K, self.replicates = d, S, K, replicates
        self.ball = glb.Ball(d, S)
        self.program = glb.AnchoredProgram(
            FAMILY, self.ball, (replicates,), validate=False, device=device
        )
        self.theta_star = torch.full(
            (d,), (S - 1) / math.sqrt(d), dtype=torch.float64, device=device
        )
        self.generator = torch.Generator(device).manual_seed(seed)
        self.t = 1

    def arms(self) -> Tensor:
        """New arms, the same for all replicates."""
        arms = draw_arms(self.generator, self.K, self.d)
        return arms.expand(self.replicates, self.K, self.d)

    def learn(self, x: Tensor) -> None:
        """Draws the rewards of ``x (replicates, d)`` and goes on to the next round."""
        self.program.append(x, FAMILY.sample(x @ self.theta_star, self.generator))
        self.t += 1

    def play(self) -> glb.AnchoredProgram:
        """One round of OFUGLB."""
        arms = self.arms()
        choice = self.program.argmax(arms, radius(self.t, self.d, self.S))
        self.learn(arms[torch.arange(self.replicates), choice.index])
        return self.program

    def fill(self, n: int) -> None:
        """Plays random arms until n observations are in."""
        missing = n - len(self.program.history)
        arms = draw_arms(self.generator, self.replicates, missing, self.d)
        rewards = FAMILY.sample(arms @ self.theta_star, self.generator)
        self.program.append(arms, rewards)
        self.t = n + 1
