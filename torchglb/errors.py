"""Exceptions and warnings: bad input, a solve without its tolerance, a run that failed."""

from __future__ import annotations


class InputError(ValueError):
    """An argument was refused at the door; nothing was changed by the refused call."""


class SolverError(RuntimeError):
    """A solve ended without its certificate; the message names the batch elements."""


class RunError(RuntimeError):
    """Tasks of a run failed; the message names them, and what the others did is kept."""


class UndeclaredConstantWarning(UserWarning):
    """A certificate rests on a constant of the family that was only searched on a grid."""
