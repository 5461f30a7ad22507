"""Bandit problems for batches of replicates: ``make(name, family=, S=, replicates=, ...)``.

Every module below registers its environments when it is imported.
"""

from torchglb.environments import bandits, datasets, drift
from torchglb.environments.base import (
    Environment,
    available,
    lookup,
    make,
    options_of,
    register,
)
from torchglb.environments.off_policy import OffPolicyValue, off_policy_value
from torchglb.environments.replay import Log, Replay, replay, uniform_log

__all__ = [
    "Environment",
    "Log",
    "OffPolicyValue",
    "Replay",
    "available",
    "bandits",
    "datasets",
    "drift",
    "lookup",
    "make",
    "off_policy_value",
    "options_of",
    "register",
    "replay",
    "uniform_log",
]
