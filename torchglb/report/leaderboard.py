"""A leaderboard as text for a terminal and as one self-contained HTML file."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path

from torchglb.preferences import Leaderboard
from torchglb.report.html import Grid, Picture, Section, rendered
from torchglb.report.tables import aligned
from torchglb.simulate.files import write_bytes

HEADS = ("ranks", "name", "score", "lower", "upper", "battles")
#: competitors in the table of all pairs at most
PAIRS = 30


def leaderboard_text(board: Leaderboard) -> str:
    """The table, what it means, and which battles would teach most.

    Example:
        >>> from torchglb.preferences import battles_of, leaderboard
        >>> board = leaderboard(battles_of(["x"] * 9, ["y"] * 9, [1, 0, 1, 1, 1, 0, 1, 1, 1]))
        >>> "rank" in leaderboard_text(board)
        True
    """
    lines = aligned([list(HEADS), *_rows(board)])
    lines += ["", board.statement, *board.remarks]
    for name, value, low, high in board.coefficients:
        lines.append(f"control {name}: {value:.4g} in [{low:.4g}, {high:.4g}]")
    battles = board.next_battles(5)
    if battles:
        pairs = "; ".join(f"{battle.left} - {battle.right}" for battle in battles)
        lines += ["", f"battles that would teach most: {pairs}"]
    return "\n".join(lines)


def write_leaderboard(board: Leaderboard, path: str | os.PathLike[str]) -> Path:
    """Writes a page that needs nothing but this one file; its directory must exist.

    Example:
        >>> from torchglb.preferences import battles_of, leaderboard
        >>> board = leaderboard(battles_of(["x"] * 9, ["y"] * 9, [1, 0, 1, 1, 1, 0, 1, 1, 1]))
        >>> write_leaderboard(board, "leaderboard.html").name
        'leaderboard.html'
    """
    sections = [
        Section("Ranks and scores", Grid(HEADS, _rows(board)), " ".join(board.remarks)),
        Section("Differences of scores", _pairs(board), _pairs_note(board)),
    ]
    if board.coefficients:
        rows = [[name, *(f"{v:.4g}" for v in ends)] for name, *ends in board.coefficients]
        sections.append(Section("Controls", Grid(["control", "estimate", "lower", "upper"], rows)))
    battles = [
        [battle.left, battle.right, f"{battle.lower:.3f}", f"{battle.upper:.3f}"]
        for battle in board.next_battles(10)
    ]
    if battles:
        note = "Pairs whose order is open; those first whose difference is known least."
        table = Grid(["left", "right", "lower", "upper"], battles)
        sections.append(Section("The next most informative battles", table, note))
    page = rendered(
        name="leaderboard",
        title="Leaderboard",
        setting=board.statement,
        pictures=_pictures(board),
        sections=sections,
        listings=[],
    )
    place = Path(path)
    write_bytes(place, page.encode())
    return place


def _rows(board: Leaderboard) -> list[list[str]]:
    found = []
    for row in board.table():
        ends = [f"{row[key]:.3f}" for key in ("score", "lower", "upper")]
        found.append([row["rank"], row["name"], *ends, str(row["battles"])])
    found += [["-", name, "-", "-", "-", "-"] for group in board.unconnected for name in group]
    return found


def _pairs(board: Leaderboard) -> Grid:
    names = board.names[:PAIRS]
    rows = []
    for i, left in enumerate(names):
        cells = [
            "" if i == j else f"[{board.difference_lower[i, j]:.2f}, {high:.2f}]"
            for j, high in enumerate(board.difference_upper[i, : len(names)])
        ]
        rows.append([left, *cells])
    return Grid(["left minus right", *names], rows)


def _pairs_note(board: Leaderboard) -> str:
    more = f" The first {PAIRS} of {len(board.names)}." if len(board.names) > PAIRS else ""
    return f"Where the score of the row minus that of the column can be.{more}"


def _pictures(board: Leaderboard) -> list[Picture]:
    try:
        from torchglb.plotting import leaderboard_plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return []
    buffer = io.BytesIO()
    leaderboard_plot(board).savefig(buffer, format="png", dpi=150)
    data = base64.b64encode(buffer.getvalue()).decode()
    return [Picture("Scores with their intervals, and the ranks that are possible.", data)]
