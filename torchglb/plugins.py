"""Policies of one's own at the command line: modules that register themselves when imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

from torchglb.checks import refuse

#: the entry points under which an installed package names its modules
GROUP = "torchglb.plugins"


def load_plugins(words: Sequence[str]) -> list[str]:
    """Imports installed plugins and the modules of leading ``--import MODULE``; returns the rest.

    Modules are looked for in the current directory too.

    Example:
        >>> load_plugins(["--import", "json", "policies"])
        ['policies']
    """
    for point in metadata.entry_points(group=GROUP):
        point.load()
    left = list(words)
    while left and (left[0] == "--import" or left[0].startswith("--import=")):
        first = left.pop(0)
        if first == "--import" and not left:
            raise refuse("--import", "the name of a module", "nothing")
        load_module(left.pop(0) if first == "--import" else first.removeprefix("--import="))
    return left


def load_module(name: str) -> None:
    """Imports a module, also from the current directory."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise refuse("--import", "a module that can be imported", f"{name!r} ({error})") from None
