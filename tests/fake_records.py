"""Small records made of plain NumPy arrays: the format, without a simulation."""

import json
from pathlib import Path

import numpy as np

PAPER = (
    "ofuglb",
    "ofuglb-pb",
    "ofuglb-e",
    "emk",
    "evill",
    "rs-glincb",
    "ofulog+",
    "ada-ofu-ecolog",
)
#: policies that keep no confidence set
WITHOUT_SET = {"evill", "rs-glincb", "ada-ofu-ecolog", "random", "oracle"}
SCALE = {
    "ofuglb": 1.0, "ofuglb-pb": 0.7, "ofuglb-e": 2.8, "emk": 1.3, "evill": 1.1, "rs-glincb": 14.0,
    "ofulog+": 7.0, "ada-ofu-ecolog": 10.0, "oracle": 0.0,
}  # fmt: skip


def fake_record(
    directory,
    labels=PAPER,
    S=(4.0, 6.0),
    horizon=60,
    replicates=5,
    dim=2,
    seed=0,
    policy=None,
    far=1.0,
    **config,
):
    """Writes a record and returns its directory; `policy` gives settings by label; `far` multiplies the regret of random."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shape = (len(S), replicates)
    common = rng.random((*shape, horizon))  # common random numbers: replicates can be paired
    for label in labels:
        arrays = fake_arrays(rng, common, label, np.array(S), dim)
        arrays["regret"] *= far if label == "random" else 1.0
        (directory / "timing").mkdir(exist_ok=True)
        np.savez(directory / "timing" / f"{label}.npz", seconds=arrays.pop("seconds"))
        np.savez(directory / f"{label}.npz", **arrays)
    settings = {label: {"policy": label} | (policy or {}).get(label, {}) for label in labels}
    configuration = {
        "name": "fake",
        "title": "Time-varying arm sets",
        "family": {"name": "bernoulli"},
        "environment": "time-varying",
        "arms": 20,
        "dim": dim,
        "S": list(S),
        "theta": "paper",
        "horizon": horizon,
        "replicates": replicates,
        "delta": 0.05,
        "seed": seed,
        "policies": list(labels),
        "policy": settings,
    }
    manifest = {"versions": {"torchglb": "0.1.0"}, "seed": seed, "device": "cpu"}
    for name, value in (("config", configuration | config), ("manifest", manifest)):
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def fake_arrays(rng, common, label, S, dim):
    shape, horizon = common.shape[:2], common.shape[2]
    rounds = np.arange(1, horizon + 1)
    steps = SCALE.get(label, 4.0) * (common + 0.3 * rng.random(common.shape)) / np.sqrt(rounds)
    theta_star = np.broadcast_to(((S - 1) / np.sqrt(dim))[:, None, None], (*shape, dim))
    arrays = {
        "rounds": rounds,
        "regret": steps.cumsum(-1),
        "seconds": 1e-3 * (1 + rng.random(horizon)),
        "S": S,
        "kappa": 2 + np.exp(S) + np.exp(-S),
        "theta_hat": theta_star + 0.05 * rng.standard_normal((*shape, dim)),
        "theta_star": theta_star,
    }
    if label not in WITHOUT_SET:
        angle = np.linspace(0, 2 * np.pi, 200, endpoint=False)
        circle = np.stack([np.cos(angle), np.sin(angle)], -1)
        width = 0.3 * SCALE.get(label, 1.0)
        arrays["certificate"] = 12 * arrays["regret"]
        arrays["passes"] = np.cumsum(rng.random((*shape, horizon)), -1)
        arrays["missed"] = np.zeros(shape, dtype=bool)
        arrays["missed"][0, 0] = label == "emk"
        if dim == 2:
            arrays["boundary"] = theta_star[:, :1] + width * circle
            arrays["area"] = np.pi * width**2 * np.exp(0.1 * rng.standard_normal(shape))
    return arrays
