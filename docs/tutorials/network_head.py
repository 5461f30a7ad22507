# %% text
# # A GLM head on a network
#
# Put calibrated intervals on the output of any PyTorch network, and let gradients pass through the fit.
#
# `GLMHead` replaces the last layer. It is not trained: it is the constrained maximum likelihood estimate of the observations so far on the features of the network, so it is always up to date and comes with intervals.

# %%
import os

import torch
from matplotlib import pyplot as plt

import torchglb as glb

SMOKE = "TORCHGLB_SMOKE" in os.environ
N = 40 if SMOKE else 600
torch.manual_seed(0)

network = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
).double()
head = glb.GLMHead(network, glb.Bernoulli(), glb.Ball(dim=3, radius=6.0), delta=0.05)

# %% text
# Rewards of this world are logistic in the features of the network, so that the model is true. (On real data it is an assumption; see [what may my data do](../choose.md).)

# %%
theta_star = torch.tensor([3.0, -2.0, 1.0]).double()


def observe(contexts):
    with torch.no_grad():
        z = head.bound(network(contexts)) @ theta_star
    return torch.bernoulli(torch.sigmoid(z))


widths = []
new = torch.randn(6, 8).double()
for contexts in torch.randn(N, 8).double().split(20):
    head.update(contexts, observe(contexts))
    bounds = head.confidence(new)
    widths.append((bounds.upper - bounds.lower).detach())
print("prediction   ", head(new).detach().numpy().round(2))
print("lower        ", bounds.lower.detach().numpy().round(2))
print("upper        ", bounds.upper.detach().numpy().round(2))

# %%
plt.plot(torch.arange(1, len(widths) + 1) * 20, torch.stack(widths))
plt.xlabel("observations")
plt.ylabel("width of the intervals of six contexts")

# %% text
# ## Gradients through the fit
#
# The estimate is the solution of a convex problem, so it has derivatives with respect to everything that went in. Here: how the weights of the network move an interval. This is what `experiments/active_design.py` and `experiments/bilevel_features.py` use.

# %%
width = head.confidence(new, differentiable=True).width.mean()
width.backward()
print("mean width", width.item(), "gradient norm", network[0].weight.grad.norm().item())

# %% text
# !!! warning "What the intervals promise"
#     They hold at all times for a representation that was fixed before the rewards came (pretrained on other data, or random). Once a network is trained on the same rewards, they are what its features suggest and no more.
