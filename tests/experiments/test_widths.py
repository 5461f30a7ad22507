"""The script on interval widths runs in quick mode, and draws and judges what it measured."""

import sys
from pathlib import Path

import pytest
import torch

import torchglb as glb

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import widths


def test_quick_mode(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(widths, "TIMES", (10, 100))
    assert widths.main(["--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| 2 | 100 |" in out
    assert "met      centred, n <= 200" in out
    assert "met      auto, n <= 200" in out
    assert (tmp_path / "widths.png").stat().st_size > 10_000
    rows = (tmp_path / "widths.csv").read_text().splitlines()
    assert rows[0] == "d,n,interval,width"
    assert len(rows) == 1 + 4 * len(widths.COLUMNS)


def test_verdicts():
    found = {
        (2, 100): {"pac-bayes": 1.0, "centred": 1.06, "auto": 1.04},
        (2, 10_000): {"mixture": 0.1, "pac-bayes": 0.11, "centred": 0.0925, "auto": 0.111},
        (2, 100_000): {"pac-bayes": 0.1, "centred": 0.09, "auto": 0.09},
    }
    answers = widths.verdicts(found)
    assert [holds for _, holds in answers] == [False, True, False, True, True, False]
    assert "0.925 <= 0.92" in answers[0][0]
    assert "auto, n > 200: at most 1.009 of pac-bayes (d = 2, n = 10000)" in answers[-1][0]


def test_sampled_mixture_is_that_of_the_cubature():
    X, r = widths.draw(2, 300, torch.Generator().manual_seed(1))
    sequence = glb.ConfidenceSequence(glb.Bernoulli(), glb.Ball(2, 4.0), widths.DELTA, "mixture")
    sequence.update(X, r)
    current = sequence.current()
    found = widths.sampled_level(current.likelihood, current.center)
    assert found == pytest.approx(float(current.level), abs=4 * widths.ENOUGH)
    # at the boundary of the ball hardly any draw counts, and it says so
    assert widths.sampled_level(current.likelihood, torch.tensor([30.0, 0.0]).double()) is None
