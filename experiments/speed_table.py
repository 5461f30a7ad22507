"""The speed tables of the pages, from a benchmark's record.

``python experiments/bench.py rounds --record experiments/records/rounds.json`` measures;
``python experiments/speed_table.py`` prints what README.md and docs/performance.md say about it,
and ``--write`` puts it there, between ``<!-- rounds -->`` and ``<!-- end of rounds -->``.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
RECORD = PROJECT / "experiments" / "records" / "rounds.json"
BEGIN, END = "<!-- rounds -->", "<!-- end of rounds -->"
MARKED = re.compile(f"{BEGIN}|{END}")
HEAD = ("n", "d", "SLSQP", "one bandit", "ratio", "40 at once", "ratio")


def three_digits(number: float) -> str:
    """12.4, 124, 1240: three significant digits, none behind the point from 100 on."""
    return f"{number:#.3g}" if number < 99.95 else f"{number:.0f}"


def duration(us: float) -> str:
    """Microseconds below a thousand, else milliseconds."""
    return f"{three_digits(us)} us" if us < 1000 else f"{three_digits(us / 1000)} ms"


def line(cells: tuple[str, ...]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table(record: dict[str, Any], arms: str) -> str:
    """The rows of one kind of arms, ``fresh`` or ``fixed``, as a Markdown table."""
    lines = [line(HEAD), "|" + "---|" * len(HEAD)]
    for row in record["rows"]:
        if row["arms"] == arms:
            one, many = row["ours"]["1"], row["ours"]["40"]
            n = f"{row['n']:,}".replace(",", " ") if row["n"] >= 10_000 else str(row["n"])
            lines.append(
                line((
                    n, str(row["d"]), duration(1000 * row["slsqp_ms"]),
                    duration(one["us"]), f"{one['ratio']:.0f}",
                    duration(many["us"]), f"{many['ratio']:.0f}",
                ))
            )  # fmt: skip
    return "\n".join(lines) + "\n"


def where(record: dict[str, Any]) -> str:
    """When, of which code and on what machine."""
    machine, versions = record["machine"], record["versions"]
    return (
        f"Measured on {record['date']} at commit {record['commit']}: one core of "
        f"{machine['cores']} ({machine['cpu']}; load {machine['load_before']:.1f} beforehand), "
        f"Python {versions['python']}, torch {versions['torch']}, SciPy {versions['scipy']}.\n"
    )


def readme(record: dict[str, Any]) -> str:
    """What README.md says: fresh arms."""
    return f"{where(record)}\n{table(record, 'fresh')}"


def page(record: dict[str, Any]) -> str:
    """What docs/performance.md says: fresh arms, fixed arms, the longest rounds."""
    worst = " and ".join(f"{w['ratio']:.0f} (d = {w['d']})" for w in record["worst"])
    return (
        f"{readme(record)}\nThe same with a fixed set of arms:\n\n{table(record, 'fixed')}\n"
        f"The longest of {record['worst'][0]['rounds']} rounds of one bandit took {worst} times "
        "their median.\n"
    )


PAGES = {PROJECT / "README.md": readme, PROJECT / "docs" / "performance.md": page}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORD, help="what bench.py wrote")
    parser.add_argument("--write", action="store_true", help="into the pages, instead of printing")
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text(encoding="utf-8"))
    for path, text in PAGES.items():
        said = text(record)
        if not options.write:
            print(f"{path.name}:\n\n{said}")
            continue
        parts = MARKED.split(path.read_text(encoding="utf-8"))
        if len(parts) != 3:
            parser.error(f"{path.name} has {len(parts) - 1} marks, 2 are wanted: {BEGIN} {END}")
        path.write_text(f"{parts[0]}{BEGIN}\n\n{said}\n{END}{parts[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
