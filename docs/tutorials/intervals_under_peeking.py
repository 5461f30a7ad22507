# %% text
# # Intervals from a table, under peeking
#
# A table of an A/B test that is looked at every day: a formula, a summary, and intervals that stay right however often one looks.

# %%
import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import torchglb as glb

SMOKE = "TORCHGLB_SMOKE" in os.environ
ROWS = 400 if SMOKE else 6000

rng = np.random.default_rng(0)
age, arm = rng.uniform(18, 80, ROWS), rng.choice(["A", "B"], ROWS)
z = -1.0 + 0.015 * (age - 40) + 0.6 * (arm == "B")
clicked = (rng.random(ROWS) < 1 / (1 + np.exp(-z))).astype(int)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "clicks.csv"
pd.DataFrame({"clicked": clicked, "age": age.round(1), "arm": arm}).to_csv(path, index=False)

# %% text
# The scale of the columns comes from what is known beforehand (or from a burn-in of rows that then count as no evidence): a scale that is computed from all rows is peeking too.

# %%
data = pd.read_csv(path)
scaler = glb.Scaler(ranges={"age": (18, 90), "arm": ["A", "B"]})
fit = glb.glm("clicked ~ age + C(arm)", data, family="bernoulli", scaler=scaler)
print(fit.summary())

# %% text
# ## Looking every day
#
# The same fit at growing parts of the table. The intervals are valid at all of these looks at once; stopping at the first one that excludes zero keeps the promise.

# %%
running = fit.running(fit.names[-1], every=ROWS // 8)
fit.plot_running(running)

# %%
print("is the effect of B at most 0?", fit.test(f"{fit.names[-1]} <= 0"))
folder.cleanup()

# %% text
# From a shell: `torchglb analyse clicks.csv --formula "clicked ~ age + C(arm)" --family bernoulli --burn-in 200 --out results/clicks`, with `--follow` for a file that grows. [The analyst's page](../analyst.md) has the details: scales, contrasts, separation, offsets.
