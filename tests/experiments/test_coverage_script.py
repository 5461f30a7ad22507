"""experiments/coverage.py: a subset of its cells, and a radius that is too small is found out."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from torchglb import radii

PATH = Path(__file__).parents[2] / "experiments" / "coverage.py"
spec = importlib.util.spec_from_file_location("coverage_script", PATH)
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules["coverage_script"] = script  # where dataclasses look; "coverage" is another package
spec.loader.exec_module(script)

TIGHT = ("pac-bayes", "centred", "auto", "centred-alone")


def results(data, arms, dim, names, settings):
    cells = [script.Cell(data, name, arms, dim) for name in names]
    *_, missed = script.simulate(cells, settings, "cpu")
    for cell in cells:
        count = int(torch.isfinite(missed[cell.radius]).sum())
        yield script.Result(cell, count, settings.replicates, settings.delta)


@pytest.mark.parametrize(
    "data", ["bernoulli", "bernoulli, weights", "bernoulli, float32", "gaussian, sigma 0.1"]
)
def test_the_tight_radii_cover_against_an_adversary(data):
    settings = script.Settings(40, 40, 0, delta=0.5)
    for result in results(data, "boundary", 2, TIGHT, settings):
        assert result.passes, result


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.05, 0.5])
@pytest.mark.parametrize("dim", script.DIMENSIONS)
@pytest.mark.parametrize("arms", script.HARD)
@pytest.mark.parametrize("data", script.DATA)
def test_all_radii_cover_against_an_adversary(data, arms, dim, delta):
    settings = script.Settings(100, 100, 0, delta=delta)
    names = [name for name in script.RADII if name != "mixture" or dim <= 2]
    for result in results(data, arms, dim, names, settings):
        assert result.p_value >= 0.01, result


def test_a_set_that_is_too_small_is_found_out(monkeypatch):
    """The same count at a third of the height: so the tests above can fail."""

    class Third(radii.PACBayes):
        def evaluate(self, *given):
            found = super().evaluate(*given)
            return found._replace(level=found.level - 2 / 3 * found.radius)

    monkeypatch.setitem(script.RADII, "pac-bayes", Third())
    settings = script.Settings(40, 40, 0, delta=0.05)
    (result,) = results("bernoulli", "boundary", 2, ["pac-bayes"], settings)
    assert not result.passes


def test_cells_are_those_of_the_head_of_the_file():
    cells = script.all_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.arms for cell in cells if cell.data not in script.PLAIN} == set(script.HARD)
    assert {cell.radius for cell in cells if cell.arms == "outside"} == {"gaussian-prior"}
    assert {cell.radius for cell in cells} == set(script.RADII)
