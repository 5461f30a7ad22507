# %% text
# # A logistic bandit and its figure
#
# Play a bandit whose rewards are clicks, with twenty new arms in every round, and see how much of the best possible reward is lost.
#
# A round: arms are shown, the policy picks one, a reward of 0 or 1 comes back with probability `mu(<x, theta*>)`, `mu` the logistic function. The policy knows the family and that `|theta*| <= S`; it does not know `theta*`.

# %%
import os

import torch
from matplotlib import pyplot as plt

import torchglb as glb
from torchglb import policies

SMOKE = "TORCHGLB_SMOKE" in os.environ  # tests run this script in small
ROUNDS, REPLICATES = (12, 2) if SMOKE else (600, 10)

family, ball = glb.Bernoulli(), glb.Ball(dim=2, radius=4.0)
theta_star = torch.tensor([2.0, -2.5]).double()

# %% text
# Three policies: the exact optimistic one with the tight radius, a one-pass learner that keeps no history, and the optimistic one with the radius of the paper. All ten replicates of a policy advance as one batch, `(10, 20, 2)` arms in every round, and all policies see the same arms.

# %%
names = ["ofuglb-pb", "glb-omd-rows", "ofuglb"]
regret = {}
for name in names:
    generator = torch.Generator().manual_seed(0)
    policy = policies.make(name, family=family, domain=ball, delta=0.05, batch_shape=(REPLICATES,))
    lost = []
    for _ in range(ROUNDS):
        arms = torch.randn(REPLICATES, 20, 2, generator=generator).double()
        arms = torch.nn.functional.normalize(arms, dim=-1)
        x = arms[torch.arange(REPLICATES), policy.select(arms)]
        mean = family.mean(x @ theta_star)
        policy.update(x, (torch.rand(REPLICATES, generator=generator) < mean).double())
        lost.append(family.mean(arms @ theta_star).amax(-1) - mean)
    regret[name] = torch.stack(lost).cumsum(0)
    print(f"{name:14} regret {regret[name][-1].mean():5.1f} +- {regret[name][-1].std():.1f}")

# %%
for name, curve in regret.items():
    mean, spread = curve.mean(1), curve.std(1)
    plt.plot(mean, label=name)
    plt.fill_between(range(ROUNDS), mean - spread, mean + spread, alpha=0.2)
plt.xlabel("round")
plt.ylabel("regret: mean and one standard deviation")
plt.legend()

# %% text
# ## What the last policy knows
#
# The set over which it is optimistic contains `theta*` at all times with probability 95%. `confidence_set()` is a snapshot of it, and every question to it has a certified answer.

# %%
region = policy.confidence_set()
arm = torch.tensor([0.6, -0.8]).double().expand(REPLICATES, 2)
interval = region.interval(arm, scale="mean")
print(
    "mean reward of one arm, first replicate:", interval.lower[0].item(), interval.upper[0].item()
)
print(
    "theta* inside, in every replicate:",
    bool(region.contains(theta_star.expand(REPLICATES, 2)).all()),
)
