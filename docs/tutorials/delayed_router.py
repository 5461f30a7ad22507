# %% text
# # A router with delayed feedback
#
# Send each request to one of several services; whether the answer was good is known only later, in any order, and the process may be restarted at any time.

# %%
import os
import random

import torch

import torchglb as glb
from torchglb import policies

SMOKE = "TORCHGLB_SMOKE" in os.environ
REQUESTS = 30 if SMOKE else 2000
torch.manual_seed(0)
random.seed(0)

# %% text
# Four services, and a request is described by three numbers. One arm is one service on this request: the request's features in the service's own block, so theta has 12 coordinates, three for each service.

# %%
SERVICES, FEATURES = 4, 3
DIM = SERVICES * FEATURES
quality = 1.2 * torch.randn(DIM).double()  # unknown to the router


def arms_of(request):
    arms = torch.zeros(SERVICES, SERVICES, FEATURES).double()
    arms[torch.arange(SERVICES), torch.arange(SERVICES)] = request
    return arms.reshape(SERVICES, DIM)


def new_request():
    request = torch.cat([torch.ones(1), torch.randn(FEATURES - 1)]).double()
    return request / max(1.0, request.norm().item())  # norm at most 1


def new_policy():
    return policies.make("glb-omd-rows", family=glb.Bernoulli(), domain=glb.Ball(DIM, 6.0))


# %% text
# Feedback arrives 0 to 50 requests later, in any order: `update` takes one row, or many, whenever they come. In the middle the process is replaced by a new one that loads the saved state and goes on to the same bits.

# %%
policy, waiting, good, best = new_policy(), [], 0.0, 0.0
for t in range(REQUESTS):
    arms = arms_of(new_request())
    choice = policy.select(arms)
    chance = torch.sigmoid(arms @ quality)
    good += chance[choice].item()
    best += chance.max().item()
    waiting.append((t + random.randint(0, 50), arms[choice], torch.bernoulli(chance[choice])))

    due = [(x, r) for time, x, r in waiting if time <= t]
    waiting = [item for item in waiting if item[0] > t]
    if due:
        policy.update(torch.stack([x for x, _ in due]), torch.stack([r for _, r in due]))

    if t == REQUESTS // 2:
        torch.save(policy.state_dict(), "router.pt")
        policy = new_policy()
        policy.load_state_dict(torch.load("router.pt", weights_only=True))
os.remove("router.pt")

print(f"good answers {good / REQUESTS:.3f}, best possible {best / REQUESTS:.3f}")
print(f"requests still waiting for feedback: {len(waiting)}")

# %% text
# !!! warning "Which delays are allowed"
#     Any delay that does not depend on the reward. If complaints come late and praise at once, the rows that are in hold too much praise, and no likelihood can see that: confidence sets then miss in most runs (`tests/test_limits.py` shows it). Wait until all feedback of a round is due, and add it together.
#
# `glb-omd-rows` keeps no history and costs the same at every time, which is what a service wants. `ofuglb-pb` plays a little better and keeps all rows; see [choose](../choose.md).
