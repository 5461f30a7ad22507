"""The examples for analysts run, in small, and say what they found."""

import importlib
import re
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def script(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXPERIMENTS)

    def run(name: str, *arguments: str) -> str:
        assert importlib.import_module(name).main(list(arguments)) == 0
        return capsys.readouterr().out

    return run


def test_an_ab_test_under_continuous_monitoring(script, tmp_path):
    out = tmp_path / "sub" / "peeking.png"
    said = script("ab_test", "--quick", "--out", str(out))
    assert out.read_bytes().startswith(b"\x89PNG")
    anytime, fixed = map(int, re.findall(r"(\d+)% with", said))
    assert anytime <= fixed
    assert "C(version)[B] - C(version)[A]" in said


def test_an_adaptive_trial(script):
    said = script("adaptive_trial", "--quick", "--repeat", "2")
    assert "look 3, 180 patients" in said
    assert re.search(r"held both effects in [12] of 2 trials", said)


@pytest.mark.slow
def test_real_data(script):
    said = script("ab_test", "--real")
    assert "lncoins" in said
    assert "19690" in said
