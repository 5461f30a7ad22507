"""Bandit problems for batches of replicates: ``make(name, family=, S=, replicates=, ...)``.

Every module below registers its environments when it is imported.
"""

from torchglb.environments import bandits
from torchglb.environments.base import (
    Environment,
    available,
    lookup,
    make,
    options_of,
    register,
)

__all__ = ["Environment", "available", "bandits", "lookup", "make", "options_of", "register"]
