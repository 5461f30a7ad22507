"""The exceptions of the library: bad input, and a solve that did not reach its tolerance."""

from __future__ import annotations


class InputError(ValueError):
    """An argument was refused at the door; nothing was changed by the refused call."""


class SolverError(RuntimeError):
    """A solve ended without its certificate; the message names the batch elements."""
