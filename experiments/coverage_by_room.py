"""What ``make coverage`` measured, room by room, and the branches of solvers not taken.

Reads ``.coverage.json`` (``python -m coverage json -o .coverage.json``) and prints the tables of
docs/tests.md; ``--write`` puts them there, between ``<!-- coverage -->`` and
``<!-- end of coverage -->``. Compiled functions, which a tracer does not see, are left out
(pyproject.toml says so to coverage).
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
PAGE = PROJECT / "docs" / "tests.md"
BEGIN, END = "<!-- coverage -->", "<!-- end of coverage -->"
SOLVERS = ("ucb", "optim", "mle")
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def share(part: int, whole: int) -> str:
    """A percentage, or a dash where there is nothing."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def by_room(files: dict[str, Any]) -> str:
    """A table with a line for each room."""
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path, found in files.items():
        room = Path(path).relative_to("torchglb").parts[0]
        for place, key in enumerate(COUNTS):
            rooms[room][place] += found["summary"][key]
    rooms["all"] = [sum(counts) for counts in zip(*rooms.values(), strict=True)]
    lines = ["| room | statements | reached | branches | taken |", "|---|---|---|---|---|"]
    for room, (statements, hit, branches, taken) in rooms.items():
        shares = share(hit, statements), share(taken, branches)
        lines.append(f"| `{room}` | {statements} | {shares[0]} | {branches} | {shares[1]} |")
    return "\n".join(lines)


def not_taken(files: dict[str, Any]) -> str:
    """The lines of solvers whose branches were not taken both ways, file by file, folded up."""
    lines = []
    for path, found in files.items():
        name = Path(path).relative_to("torchglb")
        missed = sorted({line for line, _ in found["missing_branches"]})
        if name.parts[0] in SOLVERS and missed:
            lines.append(f"    - `{name}`: {', '.join(map(str, missed))}")
    title = "Branches of the solvers that were not taken both ways, by their lines"
    return "\n".join([f'??? note "{title}"', *lines])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into the page, instead of printing")
    options = parser.parse_args(arguments)
    measured = json.loads((PROJECT / ".coverage.json").read_text(encoding="utf-8"))
    files = dict(sorted(measured["files"].items()))
    said = f"{by_room(files)}\n\n{not_taken(files)}\n"
    if not options.write:
        print(said)
        return 0
    parts = re.split(f"{BEGIN}|{END}", PAGE.read_text(encoding="utf-8"))
    if len(parts) != 3:
        parser.error(f"{PAGE.name} has {len(parts) - 1} marks, 2 are wanted: {BEGIN} {END}")
    PAGE.write_text(f"{parts[0]}{BEGIN}\n\n{said}\n{END}{parts[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
