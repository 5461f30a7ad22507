"""Experiments by name: the TOML files of ``torchglb/configs``."""

from __future__ import annotations

from pathlib import Path

from torchglb.errors import InputError
from torchglb.simulate.config import read_table

#: part of the package, in the repository and installed
CONFIGS = Path(__file__).parent.parent / "configs"


def presets() -> dict[str, str]:
    """The titles of all presets by name.

    Example:
        >>> "figure1" in presets()
        True
    """
    return {path.stem: str(read_table(path).get("title", "")) for path in _files()}


def find_preset(name: str) -> Path:
    """The file of a preset, or the file that the name itself is.

    Raises:
        InputError: with the names that exist.

    Example:
        >>> find_preset("figure1").name
        'figure1.toml'
    """
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise InputError(f"preset: expected a TOML file, got {name!r}, which does not exist")
        return Path(name)
    known = {path.stem: path for path in _files()}
    if name not in known:
        listed = ", ".join(known) or "none is installed"
        raise InputError(f"preset: expected a TOML file or one of {listed}, got {name!r}")
    return known[name]


def _files() -> list[Path]:
    return sorted(CONFIGS.glob("*.toml"))
