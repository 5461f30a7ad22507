"""Prints what ``make coverage`` measured, room by room, and the branches of solvers not taken.

Reads ``.coverage.json`` (``python -m coverage json -o .coverage.json``). Compiled functions are not
seen by a tracer: files of kernels are left out, and what is compiled elsewhere counts as missed.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SOLVERS = ("ucb", "optim", "mle.py")
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def share(part: int, whole: int) -> str:
    """A percentage, or a dash where there is nothing."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def main() -> int:
    measured = json.loads((PROJECT / ".coverage.json").read_text(encoding="utf-8"))["files"]
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    missed: list[str] = []
    for path, found in sorted(measured.items()):
        name = Path(path).relative_to("torchglb")
        if "kernels" in name.name:
            continue
        for place, key in enumerate(COUNTS):
            rooms[name.parts[0]][place] += found["summary"][key]
        if name.parts[0] in SOLVERS:
            missed += [
                f"{name}:{line}" for line in sorted({a for a, _ in found["missing_branches"]})
            ]
    print("| room | statements | reached | branches | taken |\n|---|---|---|---|---|")
    for room, (lines, hit, branches, taken) in sorted(rooms.items()):
        print(
            f"| `{room}` | {lines} | {share(hit, lines)} | {branches} | {share(taken, branches)} |"
        )
    print(f"\nBranches of the solvers that were not taken both ways ({len(missed)}):")
    print(", ".join(missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
