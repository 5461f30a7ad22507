"""The regret figures of all presets on one sheet, to be looked at together.

    python experiments/contact_sheet.py [FOLDER ...] [--runs results] [--out docs/presets.png]

Each preset's figure is drawn from the first finished run of it among the folders (a run, or a
directory of runs); one in full comes before a quick one. A preset that has none is run in its quick
form. The name of a picture says which form it shows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.image import imread
from PIL import Image

from torchglb.plotting import save_figures
from torchglb.simulate import Configuration, Record, find_preset, presets, read_table, run
from torchglb.simulate.progress import Display

COLUMNS, WIDTH = 3, 6.0
SAME = ("name", "S", "horizon", "replicates")  # what a run and a preset have in common


def expected(name: str, quick: bool) -> Configuration:
    """A preset as it stands in the package."""
    return Configuration.load(read_table(find_preset(name), quick=quick))


def records(folders: Iterable[Path]) -> Iterator[Record]:
    """The finished runs that lie in folders, or are these."""
    for folder in folders:
        for path in (folder, *sorted(folder.glob("*/"))):
            if (path / "config.json").is_file() and (record := Record.open(path)).complete:
                yield record


def found(name: str, finished: list[Record]) -> tuple[str, Record] | None:
    """A run of a preset and the form that it has, the full one if there is one."""
    for form, quick in (("in full", False), ("quick", True)):
        config = expected(name, quick)
        for record in finished:
            if all(record.config[key] == getattr(config, key) for key in SAME):
                return form, record
    return None


def sheet(pictures: dict[str, Path]) -> Figure:
    """All of them, each beneath its name, the flat ones first so that rows have no gaps."""

    def height(named: tuple[str, Any]) -> float:
        return float(named[1].shape[0] / named[1].shape[1])

    images = dict(sorted(((name, imread(path)) for name, path in pictures.items()), key=height))
    heights = [height(named) for named in images.items()]
    rows = [max(heights[i : i + COLUMNS]) + 0.08 for i in range(0, len(heights), COLUMNS)]
    figure = Figure(figsize=(COLUMNS * WIDTH, WIDTH * sum(rows)), layout="constrained")
    axes = figure.subplots(len(rows), COLUMNS, squeeze=False, height_ratios=rows).ravel()
    for axis in axes:
        axis.axis("off")
        axis.set_anchor("N")
    for axis, (name, image) in zip(axes, images.items(), strict=False):
        axis.imshow(image)
        axis.set_title(name, fontsize=14, parse_math=False)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="with runs that are there already")
    parser.add_argument("--executor", default="serial", help="or processes: two at a time")
    parser.add_argument("--runs", type=Path, default=Path("results"), help="read, and for new runs")
    parser.add_argument("--out", type=Path, default=Path("docs") / "presets.png")
    given = parser.parse_args()
    finished = list(records([*given.folders, given.runs]))
    with tempfile.TemporaryDirectory(prefix="torchglb-sheet-") as drawn:
        pictures = {}
        for name in presets():
            form, record = found(name, finished) or (
                "quick",
                run(
                    expected(name, quick=True),
                    given.runs / f"{name}-quick",
                    executor=given.executor,
                    watch=Display(),
                ),
            )
            pictures[f"{name} ({form})"] = save_figures(record, Path(drawn) / name)[0]
        sheet(pictures).savefig(given.out, dpi=80)
    # fewer colours: below the size that a commit may add; an octree keeps red and orange apart
    with Image.open(given.out) as made:
        few = made.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
    few.save(given.out, optimize=True)
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
