"""What a benchmark measured, in a file that says when, where and of which code."""

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "numpy", "scipy", "numba")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str:
    """The short name of the commit that lies here, with ``-dirty`` if files differ from it."""
    return _git("describe", "--always", "--dirty", "--exclude=*") or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def circumstances() -> dict[str, Any]:
    """Date, commit, machine and versions; to be taken before the first measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": {
            "cpu": _processor(),
            "cores": os.cpu_count(),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """The record as JSON, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
