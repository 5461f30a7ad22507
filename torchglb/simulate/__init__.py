"""Batched bandit experiments with records, checkpoints and executors."""

from torchglb.simulate.config import Configuration, lay_over, read_table
from torchglb.simulate.executors import Watch
from torchglb.simulate.presets import find_preset, presets
from torchglb.simulate.record import Record
from torchglb.simulate.run import run, simulate

__all__ = [
    "Configuration",
    "Record",
    "Watch",
    "find_preset",
    "lay_over",
    "presets",
    "read_table",
    "run",
    "simulate",
]
