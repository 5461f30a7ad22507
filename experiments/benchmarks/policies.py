"""Time per round of every policy, and how it grows with the length of the history.

A history of t observations is given to the policy (at once, where it needs no order); some rounds
settle it, and the next ones are timed: select, update. The median of a round, divided by the number
of replicates.
"""

import math
import statistics
import time

import torch

from torchglb import Ball, Bernoulli, Gaussian, policies

DIM, ARMS, RADIUS = 2, 20, 4.0
FAMILIES = (Bernoulli(), Gaussian(0.5))
#: the exponent of t that a policy without a pass over the history stays below
NEARLY_FLAT = 0.25


def directions(*shape: int, generator: torch.Generator) -> torch.Tensor:
    rows = torch.randn((*shape, DIM), generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(rows, dim=-1)


def time_rounds(name: str, batch: int, t: int, settle: int, rounds: int) -> float:
    """Seconds per round and replicate, with t observations."""
    family = next(family for family in FAMILIES if name in policies.available(family))
    generator = torch.Generator().manual_seed(t)
    theta = 0.5 * RADIUS * directions(batch, generator=generator)
    options = {"theta_star": theta} if "theta_star" in policies.options_of(name) else {}
    policy = policies.make(
        name,
        family=family,
        domain=Ball(DIM, RADIUS),
        horizon=100_000,
        batch_shape=(batch,),
        **options,
    )

    def rewards(x: torch.Tensor) -> torch.Tensor:
        return family.sample((x * theta[:, None, :]).sum(-1), generator)

    x = directions(batch, t, generator=generator)
    policy.update(x, rewards(x))
    fixed = directions(batch, ARMS, generator=generator)
    took = []
    for k in range(settle + rounds):
        changing = directions(batch, ARMS, generator=generator)
        arms = fixed if policy.requires.fixed_arms else changing
        began = time.process_time()
        index = policy.select(arms)
        middle = time.process_time()
        row = arms.gather(-2, index[:, None, None].expand(batch, 1, DIM))
        reward = rewards(row)
        again = time.process_time()
        policy.update(row, reward)
        if k >= settle:
            took.append(middle - began + time.process_time() - again)
    # the mean: rare passes over the history count, an interrupted round is cut off
    usual = statistics.median(took)
    return statistics.mean(min(value, 20.0 * usual) for value in took) / batch


def run(quick: bool) -> None:
    sizes = (30, 100) if quick else (100, 1000, 10_000)
    batches = (1, 4) if quick else (1, 40)
    settle, rounds = (2, 3) if quick else (30, 60)
    names = sorted({name for family in FAMILIES for name in policies.available(family)})
    heads = "".join(f"{f't = {t}':>12}" for t in sizes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for batch in batches:
        print(f"microseconds per round and replicate, d = {DIM}, K = {ARMS}, batch {batch}")
        print(f"{'':16}{heads}{'exponent':>12}")
        for name in names:
            took = [time_rounds(name, batch, t, settle, rounds) for t in sizes]
            exponent = math.log(took[-1] / took[0]) / math.log(sizes[-1] / sizes[0])
            flat = "  nearly flat" if exponent < NEARLY_FLAT else ""
            cells = "".join(f"{1e6 * value:12.0f}" for value in took)
            print(f"{name:16}{cells}{exponent:12.2f}{flat}", flush=True)
    torch.set_num_threads(threads)
