"""Saved states, and updates that leave no trace if they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from torchglb.checks import refuse

T = TypeVar("T")


def taken(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """A copy of a saved tensor, which must have the shape and dtype of ``like``."""
    value = state[name]
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        expected = f"a tensor of shape {tuple(like.shape)} and dtype {like.dtype}"
        raise refuse(f"state['{name}']", expected, getattr(value, "shape", type(value).__name__))
    return value.to(like.device).clone()


def check_constants(state: Mapping[str, Any], constants: str) -> None:
    """Refuses a saved state of a policy with other constants."""
    if state["constants"] != constants:
        raise refuse("state['constants']", repr(constants), repr(state["constants"]))


class Growing(Protocol):
    """Rows that can leave again."""

    def mark(self) -> Any:
        """Where it stands."""

    def reset(self, mark: Any) -> None:
        """Forgets the rows since then."""


def learn_or_forget(histories: Sequence[Growing], learn: Callable[[], T]) -> T:
    """What ``learn`` returns; if it fails or is interrupted, its rows leave the histories again."""
    marks = [history.mark() for history in histories]
    try:
        return learn()
    except BaseException:
        for history, mark in zip(histories, marks, strict=True):
            history.reset(mark)
        raise
