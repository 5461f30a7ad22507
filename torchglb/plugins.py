"""Policies and environments of one's own: modules that register themselves when imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from torchglb.checks import refuse

#: the entry points under which an installed package names its modules
GROUP = "torchglb.plugins"


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Imports installed plugins and modules, which are looked for in the current directory too.

    Every process of a run does so, the command line and each worker.

    Raises:
        InputError: with the name of what cannot be imported.

    Example:
        >>> load_plugins(["json"])
    """
    for point in metadata.entry_points(group=GROUP):
        try:
            point.load()
        except ImportError as error:
            got = f"{point.value!r} ({error})"
            raise refuse(f"plugin {point.name}", "a module that can be imported", got) from None
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise refuse("imports", "modules that can be imported", f"{name!r} ({error})") from None
