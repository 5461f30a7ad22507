"""Tutorials are plain scripts: text in comments, code between. Here they run and become pages.

A script is cut into cells at lines that begin with ``# %%``. A cell that is ``# %% text`` is Markdown
behind ``# ``; any other is code, shown with what it printed and with the figures that it left
open. ``python docs/_build/tutorials.py NAME...`` prints pages, a form feed after each.

Set ``TORCHGLB_SMOKE=1`` to run a script in small: each reads it through ``SMOKE`` at its top.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"
#: in this order in the navigation; a script that is missing here is found by a test
ORDER = (
    "logistic_bandit",
    "intervals_under_peeking",
    "leaderboard",
    "duels",
    "when_to_stop",
    "network_head",
    "delayed_router",
    "your_own",
    "many_replicates",
    "replay_a_log",
)


@dataclass(frozen=True)
class Cell:
    """A piece of a script: Markdown or code, and the line on which it begins."""

    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Tutorial:
    """A script by its name."""

    name: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return FOLDER / f"{self.name}.py"

    @property
    def cells(self) -> list[Cell]:
        """Its pieces, in order."""
        cells: list[Cell] = []
        lines: list[str] = []
        kind, begin = "code", 1

        def close() -> None:
            text = "\n".join(lines).strip("\n")
            if not text:
                return
            if kind == "text":
                text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
            cells.append(Cell(kind, text.strip("\n"), begin))

        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.startswith("# %%"):
                close()
                lines, begin = [], number + 1
                kind = "text" if line.strip() == "# %% text" else "code"
            else:
                lines.append(line)
        close()
        return cells

    @property
    def title(self) -> str:
        """The first heading."""
        return next(
            line.removeprefix("# ")
            for cell in self.cells
            if cell.kind == "text"
            for line in cell.text.splitlines()
            if line.startswith("# ")
        )

    @property
    def opening(self) -> str:
        """The paragraph under the title."""
        text = next(cell.text for cell in self.cells if cell.kind == "text")
        return text.split("\n\n")[1].replace("\n", " ")


def every() -> list[Tutorial]:
    """Those that there are, in their order."""
    return [Tutorial(name) for name in ORDER if (FOLDER / f"{name}.py").exists()]


def figures() -> Iterator[bytes]:
    """The open figures as PNG; they are closed."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        yield buffer.getvalue()
    pyplot.close("all")


def rendered(tutorial: Tutorial) -> dict[str, str | bytes]:
    """Runs a tutorial: path in the site's sources -> its page and its figures."""
    os.environ["MPLBACKEND"] = "Agg"
    import torch

    torch.set_num_threads(1)
    made: dict[str, str | bytes] = {}
    page: list[str] = []
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": str(tutorial.path)}
    began = time.perf_counter()
    for cell in tutorial.cells:
        if cell.kind == "text":
            page.append(cell.text)
            continue
        page.append(f"```python\n{cell.text}\n```")
        printed = io.StringIO()
        code = compile("\n" * (cell.line - 1) + cell.text, str(tutorial.path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if text := printed.getvalue().rstrip():
            page.append(f"<div class=\"tutorial-output\" markdown>\n\n```text\n{text}\n```\n\n</div>")
        for image in figures():
            name = f"{tutorial.name}-{sum(key.endswith('.png') for key in made) + 1}.png"
            made[f"tutorials/{name}"] = image
            page.append(f"![A figure of this tutorial]({name})")
    seconds = time.perf_counter() - began
    page.append(f"---\n\nThis page is the script `docs/tutorials/{tutorial.name}.py` with what it printed when the site was built, in {seconds:.0f} s.")
    made[f"tutorials/{tutorial.name}.md"] = "\n\n".join(page) + "\n"
    return made


def index() -> str:
    """The list of all tutorials."""
    lines = [
        "# Tutorials",
        "Each is a plain Python script of under a minute; outputs and figures are of the run that built this site.",
        "\n".join(f"- [{t.title}]({t.name}.md): {t.opening}" for t in every()),
    ]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(f"{rendered(Tutorial(name))[f'tutorials/{name}.md']}\f")
