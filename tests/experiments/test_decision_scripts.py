"""The scripts about decisions run in small and print their tables."""

import importlib
import re
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def script(monkeypatch, tmp_path, capsys):
    """Runs a script's main in this process; returns what it printed."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        assert importlib.import_module(name).main(["--quick", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_labelling_pairs_of_digits(script):
    pytest.importorskip("sklearn")
    said = script("label_pairs")
    for name in ("widest-pair", "laplace-pairs", "random-pairs"):
        (share,) = re.findall(rf"^{name} +([\d.]+) ±", said, re.MULTILINE)
        assert 0.0 <= float(share) <= 1.0


def test_the_larger_number_wins(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    winner = importlib.import_module("label_pairs").winner
    assert winner(torch.tensor([3, 1, 4]), torch.tensor([2, 5, 4])).tolist() == [1.0, 0.0, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stopping", "lucb-contrast"),
        ("duels", "duel-ofu"),
        ("changing_worlds", "window 200"),
        ("leaderboard_validity", "bootstrap, Bonferroni"),
        ("pairs_speed", "of SciPy's"),
    ],
)
def test_quick_mode(script, name, said):
    assert said in script(name)


@pytest.mark.slow
def test_runs_of_a_leaderboard_that_were_kept_are_not_made_again(script, tmp_path):
    kept, line = tmp_path / "runs.jsonl", '{"settings": [%s, 2, 60, 0.1], "seed": %d, %s}\n'
    found = '"missed": [false, true, true], "widths": [3.0, 2.0, 1.0]'
    kept.write_text("".join(line % (5, seed, found) for seed in (0, 1)) + line % (6, 2, found))
    said = script("leaderboard_validity", "--keep", str(kept))
    assert re.search(r"each pair +[23] ", said)
    lines = kept.read_text().splitlines()
    assert len(lines) == 4
    assert '"settings": [5, 2, 60, 0.1], "seed": 2,' in lines[3]
