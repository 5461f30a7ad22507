"""The one batched loop: it owns the step limit, the finite check and the active mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchglb.optim.numbers import Numbers, known_all, numbers, pick, wait_for_any
from torchglb.optim.result import Status


class Progress(NamedTuple):
    """What a step reports of every element, ``(*B)`` each: is it done, stuck, finite?"""

    converged: Tensor | Numbers
    stuck: Tensor | Numbers
    finite: Tensor | Numbers


State = TypeVar("State", bound=tuple[Any, ...])


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
        step: maps a state (a named tuple of arrays that start with ``*B``, or of such tuples) to
            the next one.
        state: the first state.
        progress: of the first state.
        max_steps: the step limit.

    Returns:
        The last state of every element, its status ``(*B)`` and its number of steps ``(*B)``.
    """
    status = _verdict(progress)
    num_steps = 0 * status
    for _ in range(max_steps):
        active = (status < 0) & (num_steps < max_steps)
        if not any_active(active):
            break
        proposed, progress = step(state)
        num_steps = num_steps + active
        if known_all(active):
            state, status = proposed, _verdict(progress)
        else:
            state = select(active, proposed, state)
            status = pick(active, _verdict(progress), status)
    status = pick(status < 0, int(Status.MAX_STEPS), status)
    device = next(part.device for part in state if isinstance(part, Tensor))
    return (
        state,
        torch.as_tensor(status, dtype=torch.int64, device=device),
        torch.as_tensor(num_steps, dtype=torch.int64, device=device),
    )


def any_active(active: Numbers) -> bool:
    """The stopping test, and the one host synchronisation of a step."""
    return wait_for_any(active)


def _verdict(progress: Progress) -> Numbers:
    """The status of an element after a step; -1 while it runs."""
    converged, stuck, finite = (numbers(mask) for mask in progress)
    status = pick(stuck, int(Status.INACCURATE), -1)
    status = pick(converged, int(Status.CONVERGED), status)
    return pick(finite, status, int(Status.NONFINITE))


def select(mask: Numbers, new: State, old: State) -> State:
    """The state that is new where the mask says so."""
    parts = zip(new, old, strict=True)
    return type(new)(
        *(select(mask, a, b) if isinstance(a, tuple) else pick(mask, a, b) for a, b in parts)
    )
