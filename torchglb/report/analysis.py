"""One self-contained HTML file about a fitted table: coefficients, contrasts, pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchglb.estimators import Summary
from torchglb.report.html import Grid, Picture, Section
from torchglb.simulate.files import write_bytes

CAPTIONS = {
    "forest": "Estimates with their intervals, each on an axis of its own, in the units of the"
    " table. The longer interval holds however often and whenever one looks; the shorter one only"
    " for a single look at a sample whose size and rows were fixed beforehand.",
    "running": "The same intervals as rows came in. The band holds at all looks at once; the"
    " dashed lines hold at any one of them, not at several.",
}
PROMISE = (
    "With probability at least 1 - delta all coefficients lie in their intervals at all times at"
    " once, also if rows were chosen by what was seen before, and if one stopped when the result"
    " pleased. The e-value measures the evidence against a coefficient of 0; p = min(1, 1/e) is"
    " valid at all times."
)


def write_analysis(
    path: Path | str,
    title: str,
    summary: Summary,
    contrasts: Summary | None = None,
    figures: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a page that needs nothing but this one file; whatever comes from a table is escaped.

    Args:
        path: of the HTML file; its directory is created if missing.
        title: its heading.
        summary: of the coefficients.
        contrasts: a second table.
        figures: matplotlib figures by name (``"forest"``, ``"running"``).

    Returns:
        The path.
    """
    pages = Environment(
        loader=PackageLoader("torchglb.report", "."), autoescape=True, undefined=StrictUndefined
    )
    pages.tests["best"] = lambda cell: False
    sections = [Section("Coefficients", _grid(summary), PROMISE)]
    if contrasts is not None:
        sections.append(Section("Contrasts", _grid(contrasts)))
    facts = Grid(["", ""], [[key, text] for key, text in summary.facts.items()])
    page = pages.get_template("analysis.html.jinja").render(
        title=title,
        warnings=list(summary.warnings),
        sections=sections,
        pictures=[_picture(name, figure) for name, figure in (figures or {}).items()],
        facts=facts,
    )
    path = Path(path)
    write_bytes(path, page.encode())
    return path


def _grid(summary: Summary) -> Grid:
    rows: Sequence[Sequence[str]] = summary.cells()
    return Grid(summary.heads(), rows)


def _picture(name: str, figure: Any) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return Picture(CAPTIONS.get(name, name), base64.b64encode(buffer.getvalue()).decode("ascii"))
