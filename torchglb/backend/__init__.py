"""How small scalar functions become compiled code, and the few that every room shares."""

from torchglb.backend.compiled import (
    Floats,
    Ints,
    Reals,
    allocating,
    bound,
    bound_once,
    entry,
    floats_at,
    inlined,
    kernel,
    record,
    record_type,
    vectorised,
)
from torchglb.backend.stored import StoredCalls

__all__ = [
    "Floats",
    "Ints",
    "Reals",
    "StoredCalls",
    "allocating",
    "bound",
    "bound_once",
    "entry",
    "floats_at",
    "inlined",
    "kernel",
    "record",
    "record_type",
    "vectorised",
]
