# %% text
# # Replay of a log
#
# What would another policy have earned, judged by the log of one that chose at random?
#
# Two answers. **Replay** plays a learning policy on the log and counts the events in which it agrees with what was logged. **Off-policy value** judges a fixed choice by weighting, with an interval that holds at every time.

# %%
import os

import torch
from matplotlib import pyplot as plt

import torchglb as glb
from torchglb import environments, policies

SMOKE = "TORCHGLB_SMOKE" in os.environ
EVENTS = 60 if SMOKE else 4000

world = environments.make("fixed", family=glb.Bernoulli(), S=4.0, replicates=4, arms=5)
log = environments.uniform_log(world, events=EVENTS)
print("arms", tuple(log.arms.shape), "index", tuple(log.index.shape))

# %% text
# A log of your own is `environments.Log(arms, index, rewards, propensity)` with shapes `(*B, n, K, d)`, `(*B, n)`, `(*B, n)`, `(*B, n, K)`. Without propensities the choice was uniform. Where the least propensity changes from event to event, replay wants `floor=`, a number fixed before the log was written that no propensity is below: the least one of the whole log would look ahead, and keep events for what they earned.

# %%
for name in ("ofuglb-pb", "ts", "random"):
    policy = policies.make(name, family=world.family, domain=world.domain, batch_shape=(4,))
    found = environments.replay(policy, log)
    print(
        f"{name:10} mean reward {found.mean_over_replicates()}, events kept {found.kept.tolist()}"
    )

# %% text
# A fixed choice needs no learning, so every event counts: inverse propensities and a doubly robust correction, with a confidence sequence.

# %%
always = [torch.full_like(log.index, k) for k in range(5)]
values = [environments.off_policy_value(log, a, reward_range=(0.0, 1.0)) for a in always]
for k, value in enumerate(values):
    print(
        f"always arm {k}: {value.value[0]:.3f} in [{value.lower[0, -1]:.3f}, {value.upper[0, -1]:.3f}]"
    )

# %%
for k, value in enumerate(values[:3]):
    plt.fill_between(
        range(EVENTS), value.lower[0], value.upper[0], alpha=0.3, label=f"always arm {k}"
    )
plt.xlabel("events")
plt.ylabel("value: 95%, at all times at once")
plt.legend()
