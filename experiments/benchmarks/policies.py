"""Time per round of every policy of every preset, and how it grows with the length of the history.

The rows of a good player (the best arm in four rounds of five, any arm in the fifth) are given to
the policy up to some t, all at once; then it plays for itself: some hundred rounds settle it, since
in play what it carries comes along with the rows, and the next ones are timed, select and update.
Passes over the history come now and then, so rounds are timed in windows: the median of the
windows' means. The exponent is the slope of log time against log t.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchglb.environments import Environment
from torchglb.simulate.config import Configuration, read_table
from torchglb.simulate.presets import find_preset, presets

BATCH, SIZES = 20, (1000, 3162, 10_000)
#: rounds that settle a policy, windows that are timed, and rounds in each
SETTLE, SETTLE_QUICK, WINDOWS, WINDOW = 300, 40, 8, 8
#: the exponent of t stays below this
BAR = 0.2


def configuration(name: str, batch: int) -> Configuration:
    """A preset with so many problems, spread over its S."""
    table = read_table(find_preset(name))
    S = table["S"][-batch:]
    return Configuration.load(table | {"S": S, "replicates": max(1, batch // len(S))})


def rows_of(world: Environment, count: int) -> tuple[Tensor, Tensor]:
    """The rows ``(B, count, d)`` and rewards of a good player."""
    generator = torch.Generator().manual_seed(0)
    every, features, rewards = torch.arange(len(world.S)), [], []
    for t in range(count):
        arms = world.arms(t)
        if world.theta_star is None or t % 5 == 4:
            index = torch.randint(arms.shape[-2], every.shape, generator=generator)
        else:
            index = (arms @ world.theta_star[..., None])[..., 0].argmax(-1)
        features.append(arms[every, index])
        rewards.append(world.rewards(t, features[-1], index))
    return torch.stack(features, 1), torch.stack(rewards, 1)


def time_rounds(
    config: Configuration,
    world: Environment,
    label: str,
    rows: tuple[Tensor, Tensor],
    sizes: Sequence[int],
    settle: int,
) -> list[float]:
    """Microseconds per round and replicate at each t."""
    policy = config.make_policy(label, world)
    every, found = torch.arange(len(world.S)), []
    for size in sizes:
        more = slice(policy.rounds, size)
        policy.update(*(part[:, more] for part in rows))
        windows: list[float] = []
        for k in range(settle + WINDOWS * WINDOW):
            arms = world.arms(size + k)
            began = time.process_time()
            index = policy.select(arms)
            middle = time.process_time()
            x = arms[every, index]
            reward = world.rewards(size + k, x, index)
            again = time.process_time()
            policy.update(x, reward)
            took = middle - began + time.process_time() - again
            if k >= settle and (k - settle) % WINDOW == 0:
                windows.append(0.0)
            if k >= settle:
                windows[-1] += took / WINDOW
        found.append(1e6 * statistics.median(windows) / len(every))
    return found


def run(quick: bool) -> None:
    sizes, batch = ((30, 300), 4) if quick else (SIZES, BATCH)
    settle = SETTLE_QUICK if quick else SETTLE
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    heads = "".join(f"{f't = {t}':>11}" for t in sizes)
    print(f"microseconds per round and replicate, batch {batch}; and of one replicate alone")
    print(f"{'':32}{heads}{'exponent':>10}{f'alone, t = {sizes[-1]}':>19}")
    worst = 0.0
    for name in presets():
        together, alone = configuration(name, batch), configuration(name, 1)
        worlds = [config.make_environment(range(config.elements)) for config in (together, alone)]
        many, one = (rows_of(world, sizes[-1]) for world in worlds)
        for label in together.policy:
            took = time_rounds(together, worlds[0], label, many, sizes, settle)
            exponent = float(np.polyfit(np.log(sizes), np.log(took), 1)[0])
            single = time_rounds(alone, worlds[1], label, one, sizes[-1:], settle)[0]
            cells = "".join(f"{value:11.1f}" for value in took)
            missed = "  MISSED" if exponent >= BAR and not quick else ""
            title = f"{name} {label}"
            print(f"{title:32}{cells}{exponent:10.2f}{single:19.0f}{missed}", flush=True)
            worst = max(worst, exponent)
    if not quick:
        verdict = "met" if worst < BAR else "MISSED"
        print(f"bar: every exponent below {BAR:g}: {verdict} (largest {worst:.2f})")
    torch.set_num_threads(threads)
