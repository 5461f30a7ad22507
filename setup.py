"""The build refuses to make a package without presets: everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PRESETS = Path(__file__).parent / "torchglb" / "configs"


class BuildWithPresets(build_py):
    """Copies the package, if its presets are there."""

    def run(self) -> None:
        """Builds."""
        if not list(PRESETS.glob("*.toml")):
            raise SystemExit(f"{PRESETS}: expected the presets (*.toml), got none")
        super().run()


setup(cmdclass={"build_py": BuildWithPresets})
