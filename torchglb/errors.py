"""Exceptions and warnings: bad input, a solve without its tolerance, a run that failed."""

from __future__ import annotations


class InputError(ValueError):
    """An argument was refused at the door; nothing was changed by the refused call.

    Example:
        >>> import torchglb as glb
        >>> try:
        ...     glb.Ball(2, -1.0)
        ... except InputError as refused:
        ...     print(refused)
        radius: expected a positive finite number, got -1.0
    """


class SolverError(RuntimeError):
    """A solve ended without its certificate; the message names the batch elements.

    Example:
        >>> import torch
        >>> import torchglb as glb
        >>> loss = glb.NegativeLogLikelihood(glb.Bernoulli(), [[1.0]], [1.0])
        >>> program = glb.SublevelProgram(loss, glb.Ball(1, 1.0), 0.1)  # an empty set
        >>> try:
        ...     glb.support(program, [[1.0]])
        ... except SolverError as failed:
        ...     print(str(failed)[:34])
        support: INFEASIBLE (the constrain
    """


class RunError(RuntimeError):
    """Tasks of a run failed; the message names them, and what the others did is kept."""


class BoundaryWarning(UserWarning):
    """The observations refute ``|theta*| <= S``: the ball is too small, and sets within it wrong.

    See :mod:`torchglb.radii.boundary`. Take a larger S, or the radius ``"gaussian-prior"``, which
    needs none.

    Example:
        >>> import warnings
        >>> import torchglb as glb
        >>> sequence = glb.ConfidenceSequence(glb.Gaussian(), glb.Ball(1, 2.0), 0.05)
        >>> sequence.update([[1.0]] * 500, [6.0] * 500)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     region = sequence.current()
        >>> caught[0].category.__name__
        'BoundaryWarning'
    """


class TrainingModeWarning(UserWarning):
    """A network in training mode has dropout or batch statistics: its features are no function.

    They are then random, or depend on their companions, and intervals mean nothing: call
    ``head.eval()`` before observations come in and answers are asked for.

    Example:
        >>> import warnings
        >>> import torch
        >>> import torchglb as glb
        >>> network = torch.nn.Sequential(torch.nn.Linear(5, 2), torch.nn.Dropout(0.5))
        >>> head = glb.GLMHead(network, glb.Bernoulli(), glb.Ball(2, 3.0))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     head.update(torch.randn(20, 5), torch.ones(20))
        >>> caught[0].category.__name__
        'TrainingModeWarning'
    """


class UndeclaredConstantWarning(UserWarning):
    """A certificate rests on a constant of the family that was only searched on a grid."""
