# %% text
# # Duels, and which pair to ask
#
# When one can only ask "which of these two?", choose the pair: for little regret, to find the best, or to learn the whole order.

# %%
import os

import torch
from matplotlib import pyplot as plt

from torchglb.preferences import PreferenceSequence, compare_duels

SMOKE = "TORCHGLB_SMOKE" in os.environ
HORIZON, REPLICATES = (8, 2) if SMOKE else (250, 4)

found = compare_duels(
    ["duel-ofu", "max-in-p", "random-pairs"], items=6, dim=3, replicates=REPLICATES, horizon=HORIZON
)
for name, result in found.items():
    print(f"{name:14} regret {result.regret[:, -1].mean():6.1f}")
    plt.plot(result.regret.mean(0), label=name)
plt.xlabel("duels")
plt.ylabel("regret")
plt.legend()

# %% text
# ## By hand
#
# A sequence of comparisons is a confidence sequence; the chance that a beats b has an interval that may be looked at after every answer, and `widest` names the pair that is known least.

# %%
items = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.6]]).double()
sequence = PreferenceSequence(dim=2, S=3.0, delta=0.05)
sequence.update(items[[0] * 60], items[[1] * 60], [1.0] * 48 + [0.0] * 12)
chance = sequence.current().probability(items[0], items[1])
print(
    f"item 0 beats item 1 with a chance in [{float(chance.lower):.2f}, {float(chance.upper):.2f}]"
)
widest = sequence.current().widest(items)[0]
print(f"ask next: item {widest.left} against item {widest.right}")

# %% text
# More: [preferences](../preferences.md). With `PairHead` the items may be anything that a network embeds.
