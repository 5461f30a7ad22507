"""Exceptions and warnings: bad input, a solve without its tolerance, a run that failed."""

from __future__ import annotations


class InputError(ValueError):
    """An argument was refused at the door; nothing was changed by the refused call."""


class SolverError(RuntimeError):
    """A solve ended without its certificate; the message names the batch elements."""


class RunError(RuntimeError):
    """Tasks of a run failed; the message names them, and what the others did is kept."""


class BoundaryWarning(UserWarning):
    """The observations refute ``|theta*| <= S``: the ball is too small, and sets within it wrong.

    See :mod:`torchglb.radii.boundary`. Take a larger S, or the radius ``"gaussian-prior"``, which
    needs none.
    """


class UndeclaredConstantWarning(UserWarning):
    """A certificate rests on a constant of the family that was only searched on a grid."""
