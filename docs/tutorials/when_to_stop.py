# %% text
# # When to stop
#
# Sample until one arm is certainly the best, up to an epsilon, and stop at that moment.

# %%
import os

import torch

import torchglb as glb
from torchglb import policies
from torchglb.decisions import BestArm

SMOKE = "TORCHGLB_SMOKE" in os.environ
LIMIT = 40 if SMOKE else 3000

arms = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]], dtype=torch.float64)
theta_star = torch.tensor([1.8, 0.2]).double()
family = glb.Bernoulli()

# %% text
# `BestArm` looks at a policy, a confidence sequence or a set. The policy `lucb-contrast` plays, of the leader and its strongest challenger, the arm that shrinks their difference most. Looking after every observation is allowed: the sets hold at all times at once.

# %%
for name in ("lucb-contrast", "random"):
    torch.manual_seed(0)
    log = glb.ConfidenceSequence(family, glb.Ball(2, 3.0), delta=0.05, aggregate=True)
    policy = policies.make(name, family=family, domain=glb.Ball(2, 3.0), delta=0.05)
    best = BestArm(log, arms, epsilon=0.2)
    for t in range(1, LIMIT + 1):
        x = arms[policy.select(arms)]
        r = family.sample(x @ theta_star)
        policy.update(x, r)
        log.update(x, r)
        if t % 20 == 0 and bool(best.should_stop()):
            break
    print(f"{name:14} after {t} observations, stopped: {bool(best.should_stop())}")
    print("  ", best.statement())

# %% text
# More: [best arms, stopping, safety, changing worlds](../stopping.md).
