"""Observations: the rows of a history, how they are kept, checked, merged, saved and summed."""

from torchglb.rows.buffers import Rows
from torchglb.rows.history import History

__all__ = ["History", "Rows"]
