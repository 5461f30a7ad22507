# %% text
# # A leaderboard
#
# Rank competitors by battles in pairs, with ranks that are sets and stay right while battles come in.

# %%
import os

import numpy as np
from matplotlib import pyplot as plt

from torchglb.preferences import leaderboard

SMOKE = "TORCHGLB_SMOKE" in os.environ
BATTLES = 200 if SMOKE else 6000

rng = np.random.default_rng(0)
names = ["ada", "bob", "cyd", "dee", "eve", "fay"]
strength = np.array([1.2, 0.7, 0.6, 0.0, -0.8, -1.5])
pairs = np.array([rng.choice(6, 2, replace=False) for _ in range(BATTLES)])
chance = 1 / (1 + np.exp(-(strength[pairs[:, 0]] - strength[pairs[:, 1]])))
uniform = rng.random(BATTLES)
tie = 0.4 * np.minimum(chance, 1 - chance)  # half a win each: the mean is still the chance
lost = np.where(uniform > chance + tie / 2, "model_b", "tie")
winner = np.where(uniform < chance - tie / 2, "model_a", lost)
battles = {
    "model_a": [names[i] for i in pairs[:, 0]],
    "model_b": [names[j] for j in pairs[:, 1]],
    "winner": winner.tolist(),
}

# %% text
# A tie is half a win. Every difference is bounded at once and at all times, so the ranks below hold together with probability 95%, whoever chose the pairs.

# %%
board = leaderboard(battles)
print(board.statement, end="\n\n")
for line in board.table():
    print("{rank:4} {name}  {score:5.2f}  in [{lower:.2f}, {upper:.2f}]".format(**line))

# %%
for place in range(len(board.names)):
    best, worst = int(board.best_rank[place]), int(board.worst_rank[place])
    plt.plot([best, worst], [place, place], "o-", lw=6)
plt.yticks(range(len(board.names)), board.names)
plt.gca().invert_yaxis()
plt.xlabel("rank: all that the battles leave possible")

# %% text
# Two competitors directly, and which battles would teach most:

# %%
lower, upper = board.difference("bob", "cyd")
print(f"bob minus cyd: in [{lower:.2f}, {upper:.2f}]")
for battle in board.next_battles(3):
    print(f"{battle.left} against {battle.right}")

# %% text
# From a shell: `torchglb leaderboard battles.csv --left model_a --right model_b --winner winner --out results/board`. More: [preferences](../preferences.md).
