"""The script on interval widths runs in quick mode, and draws and judges what it measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import widths


def test_quick_mode(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(widths, "TIMES", (10, 100))
    assert widths.main(["--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| 2 | 100 |" in out
    assert "met      n <= 200" in out
    assert (tmp_path / "widths.png").stat().st_size > 10_000
    rows = (tmp_path / "widths.csv").read_text().splitlines()
    assert rows[0] == "d,n,interval,width"
    assert len(rows) == 1 + 2 * 5 + 2 * 4  # the exact mixture for d = 2 only


def test_verdicts():
    found = {
        (2, 100): {"pac-bayes": 1.0, "centred": 1.06, "chi2": 0.5},
        (2, 10_000): {"mixture": 0.1, "pac-bayes": 0.11, "centred": 0.0925, "chi2": 0.05},
        (2, 100_000): {"pac-bayes": 0.1, "centred": 0.09, "chi2": 0.05},
    }
    answers = widths.verdicts(found)
    assert [holds for _, holds in answers] == [False, True, False]
    assert "0.925 <= 0.92" in answers[0][0]
