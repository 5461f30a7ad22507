"""Prints what ``make coverage`` measured, room by room, and the branches of solvers not reached."""

import sys
from collections import defaultdict
from pathlib import Path

import coverage

PACKAGE = Path(__file__).resolve().parent.parent / "torchglb"
SOLVERS = ("ucb", "optim", "mle.py")


def main() -> int:
    data = coverage.Coverage()
    data.load()
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    missed: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        # compiled functions are not seen by a tracer
        if "kernels" in path.name:
            continue
        found = data._analyze(str(path))
        numbers, name = found.numbers, path.relative_to(PACKAGE)
        room = rooms[name.parts[0]]
        for place, value in enumerate(
            (
                numbers.n_statements,
                numbers.n_executed,
                numbers.n_branches,
                numbers.n_executed_branches,
            )
        ):
            room[place] += value
        if name.parts[0] in SOLVERS:
            arcs = found.missing_branch_arcs()
            missed += [f"{name}:{line}" for line in sorted(arcs)]
    print("| room | statements | reached | branches | reached |\n|---|---|---|---|---|")
    for room, (lines, hit, branches, taken) in sorted(rooms.items()):
        share = f"{100 * hit / lines:.0f}%" if lines else "-"
        share_taken = f"{100 * taken / branches:.0f}%" if branches else "-"
        print(f"| `{room}` | {lines} | {share} | {branches} | {share_taken} |")
    print(f"\nBranches of the solvers that were not taken both ways ({len(missed)}):")
    print(", ".join(missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
