"""Packages that only this room needs: loaded when first used, named where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from torchglb.errors import InputError


def needed(package: str, extra: str = "table") -> ModuleType:
    """A package of an optional extra.

    Args:
        package: what to import.
        extra: the extra of torchglb that installs it.

    Raises:
        InputError: where it is not installed, with the line to type.

    Example:
        >>> needed("json").__name__
        'json'
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or package.partition(".")[0] != error.name.partition(".")[0]:
            raise
        raise InputError(
            f"{error.name}: expected the package to be installed"
            f" (pip install 'torchglb[{extra}]'), got none"
        ) from None
