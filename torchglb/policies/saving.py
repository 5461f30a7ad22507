"""Saved states, and updates that leave no trace if they fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from torchglb.checks import refuse

T = TypeVar("T")

#: settings that are said elsewhere, or that a state does not depend on
SETTLED = frozenset(
    {"family", "domain", "delta", "horizon", "batch_shape", "seed", "solver", "chunk"}
)


def own_settings(policy: object, base: type) -> dict[str, Any]:
    """The settings that the class of a policy adds to those of ``base``: numbers, words, objects.

    Args:
        policy: whose classes keep their arguments as attributes of the same name.
        base: the class whose own arguments are not meant.
    """
    found: dict[str, Any] = {}
    for cls in type(policy).__mro__:
        if "__init__" in cls.__dict__ and cls is not base and issubclass(cls, base):
            for name in inspect.signature(cls.__init__).parameters:
                value = getattr(policy, name, None)
                plain = isinstance(value, bool | int | float | str)
                if name not in SETTLED and (plain or is_dataclass(value)):
                    found.setdefault(name, value)
    return found


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
