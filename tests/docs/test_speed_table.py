"""The speed tables of the pages are those of the benchmark's record."""

import json
import re
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
RECORD = json.loads((PROJECT / "experiments" / "records" / "rounds.json").read_text("utf-8"))
PAGES = {"README.md": ["fresh"], "docs/performance.md": ["fresh", "fixed"]}


def block(page: str) -> str:
    """What stands between the two marks."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    (found,) = re.findall(r"<!-- rounds -->\n(.*?)<!-- end of rounds -->", text, re.DOTALL)
    return found


def in_microseconds(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"us": 1.0, "ms": 1000.0}[unit]


def same(shown: float, measured: float) -> bool:
    """Three digits of it."""
    return abs(shown - measured) <= 5e-3 * measured


@pytest.mark.parametrize("page", PAGES)
def test_the_page_says_when_and_of_which_code(page):
    assert f"on {RECORD['date']} at commit {RECORD['commit']}:" in block(page)


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_the_records(page):
    lines = [line.strip("| ").split(" | ") for line in block(page).splitlines() if "|" in line]
    shown = [cells for cells in lines if cells[0][0].isdigit()]
    wanted = [row for arms in PAGES[page] for row in RECORD["rows"] if row["arms"] == arms]
    assert len(shown) == len(wanted) == 8 * len(PAGES[page])
    for (n, d, peer, one, ratio, many, ratio_many), row in zip(shown, wanted, strict=True):
        assert (int(n.replace(" ", "")), int(d)) == (row["n"], row["d"])
        assert same(in_microseconds(peer), 1000 * row["slsqp_ms"])
        for batch, time, times in (("1", one, ratio), ("40", many, ratio_many)):
            assert same(in_microseconds(time), row["ours"][batch]["us"])
            assert int(times) == round(row["ours"][batch]["ratio"])


def test_the_longest_rounds_are_the_records():
    for worst in RECORD["worst"]:
        assert f"{worst['ratio']:.0f} (d = {worst['d']})" in block("docs/performance.md")


def test_the_record_is_of_a_whole_run_of_clean_code():
    assert not RECORD["quick"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", RECORD["commit"])
    settings = {(row["arms"], row["n"], row["d"]) for row in RECORD["rows"]}
    assert settings == {
        (arms, n, d) for arms in ("fresh", "fixed") for n in (1000, 10_000) for d in (2, 5, 10, 20)
    }
    for row in RECORD["rows"]:  # a ratio is of the two times beside it
        for ours in row["ours"].values():
            assert ours["ratio"] == pytest.approx(1000 * row["slsqp_ms"] / ours["us"], rel=1e-3)


def test_the_script_writes_what_stands_there(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "experiments"))
    monkeypatch.delitem(sys.modules, "speed_table", raising=False)
    import speed_table

    for path, text in speed_table.PAGES.items():
        assert f"\n{text(RECORD)}\n" == block(str(path.relative_to(PROJECT)))
