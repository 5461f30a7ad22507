"""Objects that learn may be shared by threads: their calls take turns.

Compiled code and torch let other threads run. Without turns one thread could write its row over
that of another, or choose from sums of which only half know a row: rows would be lost, and bounds
wrong, without a word.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Self

_Lock: Any = type(threading.RLock())


class Turns(_Lock):  # type: ignore[misc]
    """A lock that its holder may take again; a copy is a lock of its own, which nobody holds."""

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: TakesTurns, *arguments: Any, **options: Any) -> Any:
        with self._turns:
            return method(self, *arguments, **options)

    run._takes_turns = True  # type: ignore[attr-defined]
    return run


class TakesTurns:
    """An object whose methods named in ``in_turn``, also those of subclasses, wait for each other.

    Each call is one step: to choose and to learn are two, between which another thread may learn.
    A copy (``copy.copy`` is ``copy.deepcopy``) or a pickle is not made in turn; ``state_dict`` is.
    What such an object consists of (histories, programs) takes no turns.

    To give a turn back is a step that a signal can interrupt, when all else is done: whoever learns
    by the call of such an object looks whether it has learnt before undoing a part of his own.

    Example:
        >>> class Counter(TakesTurns):
        ...     in_turn = ("add",)
        ...     count = 0
        ...
        ...     def add(self):
        ...         self.count = self.count + 1
        >>> counter = Counter()
        >>> threads = [threading.Thread(target=counter.add) for _ in range(5)]
        >>> for thread in threads:
        ...     thread.start()
        >>> for thread in threads:
        ...     thread.join()
        >>> counter.count
        5
    """

    #: the methods that take turns
    in_turn: ClassVar[tuple[str, ...]] = ()
    _turns: Turns

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """With a lock from the start, before anything of a subclass runs."""
        new = super().__new__(cls)
        object.__setattr__(new, "_turns", Turns())
        return new

    def __copy__(self) -> Self:
        """A copy that learns by itself.

        With some sums of its own and some of this one's it would have those of other rows than it
        was shown.
        """
        return copy.deepcopy(self)

    def _alias(self) -> Self:
        """The same parts under another name, of which one may then be replaced."""
        new = type(self).__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls.in_turn:
            method = getattr(cls, name)
            if not hasattr(method, "_takes_turns"):
                setattr(cls, name, _in_turn(method))
