"""One name, one colour and one line for each policy, the same in every picture."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

#: no rivals: never counted among the leading ones
REFERENCES = ("oracle", "random")
Dashes = Any  # a name or a pattern, as matplotlib takes them

_DASHED: Dashes = (0, (5, 1.6))
_DOTTED: Dashes = (0, (1.2, 1.2))
_DASHDOT: Dashes = (0, (6, 1.6, 1.2, 1.6))
_LONG: Dashes = (0, (8, 1.8))  # short enough to show its gap in a legend


@dataclass(frozen=True)
class Style:
    """How a policy is shown.

    Attributes:
        name: for a legend.
        color: as ``#rrggbb``.
        linestyle: of matplotlib; colours that are hard to tell apart have different lines.

    Example:
        >>> Style("mine", "#0072b2", "--").linestyle
        '--'
    """

    name: str
    color: str
    linestyle: Dashes = "-"


#: The hues of the paper for its seven policies, with lightness and lines that keep them apart
#: also for people who see red and green alike (tests/plotting/test_plotting.py measures it).
POLICY_STYLE: dict[str, Style] = {
    "ofuglb": Style("OFUGLB", "#d7191c"),
    "ofuglb-pb": Style("OFUGLB-PB", "#1fa8d8"),
    "ofuglb-e": Style("OFUGLB-e", "#f58a1f", _DASHED),
    "emk": Style("EMK", "#1338be"),
    "evill": Style("EVILL", "#b08450", _DASHDOT),
    "rs-glincb": Style("RS-GLinCB", "#000000", _DOTTED),
    "ofulog+": Style("OFULog+", "#1b7a35", _DASHED),
    "ada-ofu-ecolog": Style("ada-OFU-ECOLog", "#8e3bb0", _DASHDOT),
    "evill-theory": Style("EVILL (theory)", "#7a4a12", _DASHDOT),
    "glb-omd": Style("GLB-OMD", "#9c1f5a", _DASHED),
    "glb-omd-realised": Style("GLB-OMD (realised)", "#ff7f6e", _DASHDOT),
    "glb-omd-rows": Style("GLB-OMD (rows)", "#6b2fd6", _DOTTED),
    "ofulog-r": Style("OFULog-r", "#5fbf3f", _DOTTED),
    "glm-ucb": Style("GLM-UCB", "#4d5a66", _DASHED),
    "gloc": Style("GLOC", "#00a79d", _DASHDOT),
    "log-ucb-1": Style("Log-UCB-1", "#7f8a00", _DASHDOT),
    "lucb-contrast": Style("LUCB-contrast", "#2f6f8f", _DOTTED),
    "ol2m": Style("OL2M", "#e26fb5", _DASHED),
    "oful": Style("OFUL", "#3d8bff", _DASHED),
    "oful-contrast": Style("OFUL (contrasts)", "#0b5563"),
    "ofuglb-contrast": Style("OFUGLB (contrasts)", "#d9468f"),
    "ts": Style("TS", "#e0b400", _DASHDOT),
    "greedy": Style("greedy", "#c3a6d8", _DOTTED),
    "random": Style("random", "#a0a0a0", _DOTTED),
    "duel-ofu": Style("duel-OFU", "#c0182b", _LONG),
    "max-in-p": Style("MaxInP", "#1f5fd0", _LONG),
    "widest-pair": Style("widest pair", "#0a0a3c", _LONG),
    "laplace-pairs": Style("Laplace pairs", "#e3a92b", _LONG),
    "random-pairs": Style("random pairs", "#9aa0a6", _LONG),
    "oracle": Style("oracle", "#d0d0d0", _DASHED),
}


def styles(labels: Sequence[str], policy: Mapping[str, str]) -> dict[str, Style]:
    """A style for every label of a record; no two share a colour.

    A label that is the name of a policy has the style of that policy. Another one takes it over
    from its policy while it is free, and else a colour of its own.

    Args:
        labels: of the record.
        policy: the policy of each label.

    Example:
        >>> both = styles(["emk", "emk-vaw"], {"emk": "emk", "emk-vaw": "emk"})
        >>> both["emk"].name, both["emk-vaw"].name
        ('EMK', 'EMK (vaw)')
    """
    found = {label: POLICY_STYLE[label] for label in labels if label in POLICY_STYLE}
    used = {style.color for style in found.values()}
    spare = (color for color in map(_spare_color, range(10_000)) if color not in used)
    for label in labels:
        if label in found:
            continue
        base = policy.get(label, label)
        style = POLICY_STYLE.get(base, Style(base, "", "-"))
        color = style.color if style.color and style.color not in used else next(spare)
        used.add(color)
        suffix = label.removeprefix(base).strip("-_ ")
        name = f"{style.name} ({suffix})" if label.startswith(base) and suffix else label
        found[label] = replace(style, name=name, color=color)
    return {label: found[label] for label in labels}


def _spare_color(index: int) -> str:
    """Hues a golden ratio apart never repeat and are far from their neighbours."""
    hue = (0.45 + 0.6180339887498949 * index) % 1.0
    rgb = colorsys.hls_to_rgb(hue, 0.36 + 0.12 * (index % 3), 0.75)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
