"""Release: ``python experiments/release.py`` checks, builds and tags the version of pyproject.toml.

``--check`` only checks, ``--tag vX.Y.Z`` compares with a tag, ``--notes`` prints the changelog of
the version. Nothing is pushed: that is a person's decision.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def version_of(project: Path) -> str:
    """The version of pyproject.toml."""
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def notes_of(project: Path, version: str) -> str:
    """What the changelog says of a version; empty if it says nothing."""
    text = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    return found.group(1).strip() if found else ""


def problems(project: Path, tag: str | None = None) -> list[str]:
    """What stands in the way of a release, one sentence each."""
    version = version_of(project)
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"pyproject.toml: expected a version X.Y.Z, got {version}")
    package = (project / "torchglb" / "__init__.py").read_text(encoding="utf-8")
    if f'__version__ = "{version}"' not in package:
        found.append(f"torchglb/__init__.py: expected __version__ = {version!r}")
    if f"version: {version}\n" not in (project / "CITATION.cff").read_text(encoding="utf-8"):
        found.append(f"CITATION.cff: expected version: {version}")
    if not notes_of(project, version):
        found.append(f"CHANGELOG.md: expected a section ## [{version}] that says something")
    if tag is not None and tag != f"v{version}":
        found.append(f"tag: expected v{version}, got {tag}")
    return found


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def build() -> list[Path]:
    """Source archive and wheel, in dist/; both must contain the presets and the license."""
    subprocess.run([sys.executable, "-m", "build"], cwd=PROJECT, check=True)
    version = version_of(PROJECT)
    wheel = PROJECT / "dist" / f"torchglb-{version}-py3-none-any.whl"
    archive = PROJECT / "dist" / f"torchglb-{version}.tar.gz"
    with zipfile.ZipFile(wheel) as packed, tarfile.open(archive) as source:
        for names in (packed.namelist(), source.getnames()):
            for needed in ("torchglb/configs/figure1.toml", "torchglb/py.typed", "LICENSE"):
                if not any(name.endswith(needed) for name in names):
                    raise SystemExit(f"dist: expected {needed} in the package, got none")
    return [wheel, archive]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check and nothing else")
    parser.add_argument("--tag", help="compare with this tag")
    parser.add_argument("--notes", action="store_true", help="print the changelog of the version")
    options = parser.parse_args(arguments)
    version = version_of(PROJECT)
    if options.notes:
        print(notes_of(PROJECT, version))
        return 0
    found = problems(PROJECT, options.tag)
    if not options.check:
        if git("status", "--porcelain"):
            found.append("git: expected a clean tree")
        if f"v{version}" in git("tag").split():
            found.append(f"git: v{version} is tagged already: raise the version")
    if found:
        print("\n".join(found))
        return 1
    if not options.check:
        built = build()
        git("tag", "-a", f"v{version}", "-m", f"torchglb {version}")
        print("built", ", ".join(path.name for path in built))
        print(f"tagged v{version}; git push --follow-tags publishes it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
