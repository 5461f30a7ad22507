"""What a saved state belongs to: the family, the ball and the settings, with all their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from torchglb.checks import refuse
from torchglb.errors import InputError

PLAIN = (bool, int, float, str, type(None))
#: what it costs to read a thing that is not a saved state
UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@contextmanager
def reading_state(owner: str) -> Iterator[None]:
    """Refuses by name what cannot be read as a state of ``owner``.

    Example:
        >>> try:
        ...     with reading_state("oful"):
        ...         {}["theta"]
        ... except InputError as refused:
        ...     print(refused)
        state: expected one of oful, got KeyError('theta')
    """
    try:
        yield
    except InputError:
        raise
    except UNREADABLE as error:
        raise InputError(f"state: expected one of {owner}, got {error!r}") from None


def describe(thing: Any) -> Any:
    """An object as plain words, numbers and lists of them, equal for objects of equal settings.

    Settings are the fields of a data class, else the public attributes that are numbers, words,
    tensors or functions (by name). What cannot be described is left out.

    Example:
        >>> from torchglb.families import Binomial
        >>> describe(Binomial(10))["trials"]
        10
    """
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, Tensor):
        return thing.detach().tolist()
    if isinstance(thing, list | tuple):
        return [describe(part) for part in thing]
    if isinstance(thing, type) or callable(getattr(thing, "__qualname__", None)):
        return thing.__qualname__
    if hasattr(thing, "__qualname__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    if is_dataclass(thing):
        found = {f.name: getattr(thing, f.name) for f in fields(thing) if f.init}
    else:
        found = {k: v for k, v in vars(thing).items() if not k.startswith("_") and k != "training"}
        for name in ("dispersion", "reward_range"):
            if hasattr(thing, name):
                found[name] = getattr(thing, name)
    kept = {k: v for k, v in found.items() if isinstance(v, (*PLAIN, Tensor, list, tuple))}
    nested = {k: v for k, v in found.items() if k not in kept and (is_dataclass(v) or callable(v))}
    return {"class": type(thing).__name__} | {k: describe(v) for k, v in (kept | nested).items()}


def check_belongs(name: str, given: Any, mine: Mapping[str, Any]) -> None:
    """Refuses the description of other settings, and says which one differs."""
    if not isinstance(given, Mapping):
        raise refuse(name, "the settings that a state belongs to", type(given).__name__)
    for key in [*mine, *(k for k in given if k not in mine)]:
        entry = f"{name}[{key!r}]"
        if isinstance(mine.get(key), Mapping) and isinstance(given.get(key), Mapping):
            check_belongs(entry, given[key], mine[key])
        elif given.get(key) != mine.get(key):
            raise refuse(entry, repr(mine.get(key)), repr(given.get(key)))
