"""The one batched loop: it owns the step limit, the finite check and the active mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchglb.optim.result import Status


class Progress(NamedTuple):
    """What a step reports of every element: whether it is done, stuck, and finite; ``(*B)`` each."""

    converged: Tensor
    stuck: Tensor
    finite: Tensor


State = TypeVar("State", bound=tuple)  # type: ignore[type-arg]


def iterate(
    step: Callable[[State], tuple[State, Progress]],
    state: State,
    progress: Progress,
    max_steps: int,
) -> tuple[State, Tensor, Tensor]:
    """Repeats ``step`` until every element has stopped; finished elements freeze.

    What one element returns never depends on its companions: each stops by its own progress, and
    later steps leave it untouched. The stopping test is the only host synchronisation.

    Args:
        step: maps a state (a named tuple of tensors that start with ``*B``) to the next one.
        state: the first state.
        progress: of the first state.
        max_steps: the step limit.

    Returns:
        The last state of every element, its status ``(*B)`` and its number of steps ``(*B)``.
    """
    status = _verdict(torch.full_like(progress.converged, -1, dtype=torch.int64), progress)
    num_steps = torch.zeros_like(status)
    for _ in range(max_steps):
        active = status < 0
        if not bool(active.any()):
            break
        proposed, progress = step(state)
        frozen = not (state[0].device.type == "cpu" and bool(active.all()))
        state = _select(active, proposed, state) if frozen else proposed
        num_steps = num_steps + active
        status = torch.where(active, _verdict(status, progress), status)
    return state, torch.where(status < 0, int(Status.MAX_STEPS), status), num_steps


def _verdict(status: Tensor, progress: Progress) -> Tensor:
    """The status of running elements (-1) after a step."""
    status = torch.where(progress.stuck, int(Status.INACCURATE), torch.full_like(status, -1))
    status = torch.where(progress.converged, int(Status.CONVERGED), status)
    return torch.where(progress.finite, status, int(Status.NONFINITE))


def _select(active: Tensor, new: State, old: State) -> State:
    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(active.reshape(active.shape + (1,) * (a.ndim - active.ndim)), a, b)

    return type(new)(*(pick(a, b) for a, b in zip(new, old, strict=True)))
