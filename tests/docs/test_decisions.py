"""Every python block of the pages about preferences and stopping runs."""

from pathlib import Path

import pytest
from documents import python_blocks

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    (page, line, code)
    for page in ("preferences.md", "stopping.md")
    for line, code in python_blocks((DOCS / page).read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "line", "code"), BLOCKS, ids=[f"{p}:{n}" for p, n, _ in BLOCKS])
def test_block_runs(page, line, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * line + code, page, "exec"), {"__name__": "example"})


def test_the_router_is_short_enough_to_read():
    script = DOCS.parent / "experiments" / "router.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 150
