"""The scaling script runs in quick mode, and its rates are those of the clock."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import gpu_scaling


def test_quick_mode_prints_a_rate_for_every_cell(capsys):
    assert gpu_scaling.main(["--quick", "--replicates", "1", "3", "--dims", "2"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    for line, replicates in ((first, 1), (second, 3)):
        d, count, *rates = (float(word) for word in line.split())
        assert (d, count) == (2, replicates)
        assert len(rates) == len(gpu_scaling.POLICIES)
        assert min(rates) > 0


@pytest.mark.parametrize("arguments", [["--rounds", "-1"], ["--dims", "-2"], ["--dtype", "half"]])
def test_nonsense_is_refused(arguments):
    with pytest.raises(SystemExit):
        gpu_scaling.main(["--quick", *arguments])


def test_the_rate_counts_replicates_and_rounds(monkeypatch):
    """Five rounds of seven replicates in two seconds."""
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr(gpu_scaling.time, "perf_counter", lambda: next(ticks))
    found = gpu_scaling.rate(
        "ofuglb-e", 2, 7, rounds=5, known=3, device=torch.device("cpu"), dtype=torch.float64
    )
    assert found == pytest.approx(5 * 7 / 2)
