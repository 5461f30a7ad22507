# %% text
# # Many replicates on a GPU or a cluster
#
# One policy, hundreds of independent runs at once: as one batch, over the cores of a machine, on a GPU, or on a Ray cluster, with the same numbers each time.

# %%
import os
import time

import numpy as np
import torch
from matplotlib import pyplot as plt

import torchglb as glb
from torchglb import policies
from torchglb.simulate import simulate

SMOKE = "TORCHGLB_SMOKE" in os.environ
ROUNDS = 10 if SMOKE else 150

# %% text
# ## A batch is a loop, only faster
#
# Every object has a batch shape `*B`. What one element does never depends on its companions: a replicate has the same bits alone and in a batch. On a GPU the only change is `device="cuda"`.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"


def play(replicates):
    family = glb.Bernoulli()
    policy = policies.make(
        "ofuglb", family=family, domain=glb.Ball(2, 4.0), batch_shape=(replicates,), device=device
    )
    theta = torch.tensor([2.0, -2.0], dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(0)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        arms = torch.randn(20, 2, generator=generator, dtype=torch.float64, device=device)
        arms = torch.nn.functional.normalize(arms, dim=-1).expand(replicates, 20, 2)
        x = arms[torch.arange(replicates, device=device), policy.select(arms)]
        uniform = torch.rand((), generator=generator, dtype=torch.float64, device=device)
        policy.update(x, (uniform < family.mean(x @ theta)).double())
    return replicates * ROUNDS / (time.perf_counter() - began)


play(1)  # compiled once
for replicates in (1, 10, 40):
    print(f"{replicates:3} replicates: {play(replicates):8.0f} replicate-rounds per second")

# %% text
# ## A run with a record
#
# `simulate` plays policies against an environment, keeps a record on disk that a stopped run continues from, and takes an executor: `"serial"`, `"processes"` for the cores of this machine, `"ray"` with `address=` for a cluster. One seed determines everything.

# %%
record = simulate(
    ["ofuglb-pb", "evill", "random"], horizon=ROUNDS, replicates=4, S=[4.0, 8.0], seed=1
)
for label in ("ofuglb-pb", "evill", "random"):
    regret = record.arrays(label)["regret"]  # (number of S, replicates, recorded rounds)
    print(f"{label:10} regret at S = 4, 8:", np.round(regret[..., -1].mean(1), 1))
    plt.plot(regret[0].mean(0), label=label)
plt.xlabel("recorded round")
plt.ylabel("regret, S = 4")
plt.legend()

# %% text
# From a shell, the same with figures and a report:
#
#     torchglb run figure1 --executor processes
#     torchglb run figure1 --executor ray --address HEAD:6379 --set chunk=4
#
# What travels, what it costs and what protects a run: [runs that survive](../runs.md) and [sweeps beyond one machine](../sweeps.md).
