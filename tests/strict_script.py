"""A user's script under ``mypy --strict``: what is right passes, what is wrong is noticed.

Nothing here is run. ``make test`` checks its types with those of the package, and an ignored
complaint that mypy no longer has is an error of its own.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

import torchglb as glb
from torchglb.policies import OFUGLB


def every_door_takes_numbers_of_any_kind(frame: pd.DataFrame) -> None:
    policy = glb.policies.make("ofuglb", family=glb.Bernoulli(), domain=glb.Ball(2, 3.0), delta=0.1)
    for arms in ([[1, 0], [0, 1]], np.eye(2, dtype=np.float32), torch.eye(2)):
        chosen = policy.select(arms)
        policy.update(arms[int(chosen)], np.float32(1.0), weight=0.5)
    policy.update((1.0, 0.0), True, mask=np.bool_(True))
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, np.float32(3.0)), delta=0.05)
    sequence.update(frame[["a", "b"]], frame["reward"])
    width: torch.Tensor = sequence.current().interval([1.0, 0.0], "mean", tol=1e-6).width
    print(width)


def settings_are_typed(program: glb.SublevelProgram, region: glb.sets.ConfidenceSet) -> None:
    glb.support(program, [[1, 0]], tol=1e-6, throw=False)
    glb.support(program, [[1, 0]], "conic", fallbacks=["SCS"])
    glb.support(program, [[1, 0]], glb.ucb.Native(tol=1e-6))
    glb.environments.make("fixed", family=glb.Bernoulli(), S=[1.0, 2.0], arms=10)
    OFUGLB(glb.Bernoulli(), glb.Ball(2, 3.0), batch_shape=(3,), solver="conic")

    glb.support(program, [[1, 0]], toll=1e-6)  # type: ignore[call-overload]
    glb.support(program, [[1, 0]], "conic", mode="dense")  # type: ignore[call-overload]
    glb.support(program, [[1, 0]], "natvie")  # type: ignore[call-overload]
    glb.support(program, [[1, 0]], glb.ucb.Native(), tol=1e-6)  # type: ignore[call-overload]
    region.interval([1.0, 0.0], toll=1e-6)  # type: ignore[call-arg]
    region.upper_bound([1.0, 0.0], tol="fine")  # type: ignore[arg-type]
    region.interval([1.0, 0.0], "log")  # type: ignore[arg-type]


def options_by_name_are_typed(family: glb.GLMFamily, domain: glb.Ball) -> None:
    glb.policies.make("ts", family=family, domain=domain, dleta=0.1)  # type: ignore[call-arg]
    glb.policies.make("emk", family=family, domain=domain, regularizer="x")  # type: ignore[arg-type]
    glb.environments.make("fixed", family=family, S=2.0, amrs=3)  # type: ignore[call-arg]
    glb.environments.make("fixed", family=family, S=2.0, theta="north")  # type: ignore[arg-type]
    OFUGLB(family, domain, solver="layer")  # type: ignore[arg-type]
    glb.simulate.simulate(["random"], horizon=3, replicates=1, S=2.0, sede=1)  # type: ignore[call-arg]
