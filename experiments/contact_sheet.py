"""The regret figures of all presets on one sheet, to be looked at together.

    python experiments/contact_sheet.py [--full] [--runs results] [--out docs/presets.png]

Every preset is run in its quick form (or in full), or taken from the directory of runs if it is
there already; the sheet has three columns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.image import imread
from PIL import Image

from torchglb.plotting import save_figures
from torchglb.simulate import Configuration, find_preset, presets, read_table, run
from torchglb.simulate.progress import Display

COLUMNS, WIDTH = 3, 6.0


def picture(name: str, runs: Path, quick: bool, executor: str) -> Path:
    """The file of a preset's regret figure."""
    config = Configuration.load(read_table(find_preset(name), quick=quick))
    out = runs / (f"{name}-quick" if quick else name)
    record = run(config, out, executor=executor, watch=Display())
    return save_figures(record, out)[0]


def sheet(pictures: dict[str, Path]) -> Figure:
    """All of them, each beneath its name."""
    rows = -(-len(pictures) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * WIDTH, rows * 0.85 * WIDTH), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, (name, path) in zip(axes, pictures.items(), strict=False):
        axis.imshow(imread(path))
        axis.set_title(name, fontsize=12, parse_math=False)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="not the quick forms")
    parser.add_argument(
        "--executor", default="processes", help="serial: one process, which is started only once"
    )
    parser.add_argument("--runs", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("docs") / "presets.png")
    given = parser.parse_args()
    found = {name: picture(name, given.runs, not given.full, given.executor) for name in presets()}
    sheet(found).savefig(given.out, dpi=80)
    # fewer colours: below the size that a commit may add; an octree keeps red and orange apart
    with Image.open(given.out) as made:
        few = made.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
    few.save(given.out, optimize=True)
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
