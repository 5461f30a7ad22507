"""The table of coefficients: as text, HTML, LaTeX or a frame."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: headings of the columns, and how their numbers are written
HEADS = {
    "name": "name",
    "estimate": "estimate",
    "lower": "lower",
    "upper": "upper",
    "profile_lower": "fixed-n lower",
    "profile_upper": "fixed-n upper",
    "log_e": "e-value",
    "p": "anytime p",
}
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


@dataclass(frozen=True)
class Summary:
    """Coefficients or contrasts in the units of the table.

    Attributes:
        columns: names, estimates, ends of intervals, ``log_e`` and p, each of length k.
        facts: what the numbers rest on: family, rows, delta, S, radius, scaling.
        warnings: sentences to read before the numbers.
        make: how a frame of the kind of the user's table is made.

    Example:
        >>> print(Summary({"name": ["x"], "estimate": np.array([2.0])}, {"rows": "10"}))
        rows: 10
        <BLANKLINE>
        name  estimate
        x            2
    """

    columns: Mapping[str, Any]
    facts: Mapping[str, str]
    warnings: Sequence[str] = ()
    make: Callable[[Mapping[str, Any]], Any] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.columns["name"])

    @property
    def names(self) -> list[str]:
        """Of the rows."""
        return list(self.columns["name"])

    def row(self, name: str) -> dict[str, Any]:
        """The numbers of one name."""
        at = self.names.index(name)
        return {key: values[at] for key, values in self.columns.items()}

    def to_frame(self) -> Any:
        """A frame of the kind of the table that was fitted."""
        if self.make is None:
            return dict(self.columns)
        return self.make({key: list(values) for key, values in self.columns.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and texts, for JSON; an end that is not finite is a text."""
        rows = [
            {key: _plain(values[at]) for key, values in self.columns.items()}
            for at in range(len(self))
        ]
        return {"facts": dict(self.facts), "warnings": list(self.warnings), "rows": rows}

    # ---- for people ----------------------------------------------------------------------

    def heads(self) -> list[str]:
        """Headings of the columns."""
        return [HEADS.get(key, key) for key in self.columns]

    def cells(self) -> list[list[str]]:
        """The numbers as text, row by row."""
        return [
            [written(key, values[at]) for key, values in self.columns.items()]
            for at in range(len(self))
        ]

    def __str__(self) -> str:
        table = [self.heads(), *self.cells()]
        widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
        lines = [f"{key}: {text}" for key, text in self.facts.items()]
        lines += [f"warning: {text}" for text in self.warnings]
        lines.append("")
        for row in table:
            first, *rest = (
                cell.ljust(width) if at == 0 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join([first, *rest]).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self.cells())
        facts = "; ".join(f"{key}: {text}" for key, text in self.facts.items())
        notes = "".join(f"<p><b>{html.escape(text)}</b></p>" for text in self.warnings)
        return (
            f"<table><caption>{html.escape(facts)}</caption>"
            f"<thead>{row(self.heads(), 'th')}</thead><tbody>{body}</tbody></table>{notes}"
        )

    def to_latex(self) -> str:
        """A tabular environment."""
        lines = [
            r"\begin{tabular}{l" + "r" * (len(self.columns) - 1) + "}",
            " & ".join(map(_latex, self.heads())) + r" \\ \hline",
            *(" & ".join(map(_latex, cells)) + r" \\" for cells in self.cells()),
            r"\end{tabular}",
        ]
        return "\n".join(lines)


def written(key: str, value: Any) -> str:
    """A number as people read it."""
    if isinstance(value, str):
        return value
    number = float(value)
    if key == "log_e":
        power = number / math.log(10.0)
        if math.isfinite(power) and abs(power) >= 6:
            return f"1e{math.floor(power):+03d}"
        return f"{math.exp(number):.3g}" if number < 700 else "inf"
    if key == "p":
        return f"{number:.2g}"
    return f"{number:.4g}"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    number = float(np.asarray(value))
    return number if math.isfinite(number) else str(number)
