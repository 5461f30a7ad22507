"""The scripts around neural encoders run, in small, and say what they found."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import torchglb as glb
from torchglb.plotting.neural import design_plot, race_plot, regret_curves_plot

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def script(monkeypatch, tmp_path, capsys):
    """Runs a script's main in this process; returns what it printed. The picture must be there."""
    monkeypatch.syspath_prepend(EXPERIMENTS)

    def run(name: str, *arguments: str) -> str:
        out = tmp_path / "sub" / f"{name}.png"
        assert importlib.import_module(name).main([*arguments, "--out", str(out)]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_digits(script):
    said = script("neural_digits", "--quick", "--rounds", "28", "--seeds", "2", "--steps", "2")
    for name in ("raw pixels", "random network", "learnt linear map", "learnt network"):
        (final,) = re.findall(rf"^{name} +final regret +([\d.]+)", said, re.MULTILINE)
        assert 10.0 <= float(final) <= 28.0  # 28 rounds, a tenth of them right by guessing
    assert "learnt network saves against raw pixels" in said


def test_bilevel(script):
    said = script("bilevel_features", "--quick", "--seconds", "0.3", "--seeds", "1", "--looks", "2")
    for name in ("implicit", "unrolled", "two-stage"):
        steps, before, after = re.findall(
            rf"seed 0 {name} +(\d+) steps .* ([\d.]+) -> ([\d.]+)", said
        )[0]
        assert int(steps) > 0
        assert 0.0 < float(after) < float(before) + 0.1
    assert "implicit ends below unrolled by" in said


def test_active_design(script):
    arguments = ("--quick", "--runs", "2", "--observations", "20", "--grid", "4")
    said = script("active_design", *arguments)
    for name in ("gradient ascent", "random", "G-optimal"):
        widths = re.findall(rf"  {name} +n = +\d+: largest width ([\d.]+)", said)
        assert len(widths) == 4
        assert all(0.0 < float(width) <= 1.0 for width in widths)
        assert float(widths[-1]) <= float(widths[0])
    assert "gradient ascent ends narrower than G-optimal by" in said


def test_unrolled_and_exact_heads_meet(script, monkeypatch):
    """With many steps the unrolled head is the constrained MLE, and so are its derivatives."""
    bilevel = importlib.import_module("bilevel_features")
    images, classes = bilevel.digits("cpu")
    known, _ = bilevel.sets_of_classes(0, "cpu")
    batch = bilevel.Tasks(images, classes, known, 20, 0).batch(2, 10)
    encoder = bilevel.network(0, "cpu")
    monkeypatch.setattr(bilevel, "UNROLLED_STEPS", 4000)
    ridge, slopes = torch.tensor(0.1, dtype=torch.float64, requires_grad=True), []
    for head in (bilevel.exact_head, bilevel.unrolled_head):
        loss = bilevel.held_out(encoder, head(encoder, batch, ridge), batch)
        slopes.append(torch.autograd.grad(loss, [*encoder.parameters(), ridge]))
    for exact, unrolled in zip(*slopes, strict=True):
        torch.testing.assert_close(exact, unrolled, rtol=1e-3, atol=1e-5)


def test_paired_differences(script):
    paired = importlib.import_module("_neural").paired
    # mean 2, standard deviation 1, t quantile 4.3027 with 2 degrees: 4.3027 / sqrt(3) = 2.484
    expected = "2 +- 2.5 (95%, Student, 3 pairs), better in 3 of 3"
    assert paired(torch.tensor([1.0, 2.0, 3.0])) == expected
    assert paired(torch.tensor([-1.0])) == "-1, better in 0 of 1"


def test_pictures_show_what_they_were_given():
    figure = regret_curves_plot({"a": [[1.0, 2.0, 2.0]] * 2, "b": [[1.0, 1.0, 1.0]]}, guess=0.9)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["a", "b", "guessing"]
    mean = figure.axes[0].get_lines()[2]  # after the two thin ones
    assert list(mean.get_ydata()) == [1.0, 2.0, 2.0]
    figure = race_plot([0.0, 1.0, 2.0, 3.0], {"a": [[0.7, 0.6, 0.5, 0.4]]})
    assert list(figure.axes[1].get_lines()[0].get_xdata()) == [2.0, 3.0]
    figure = design_plot([5], {"a": [[0.9]]}, {"a": [[0.0, 0.5]]}, [[0.1, 0.9]] * 2)
    assert figure.axes[1].get_title() == "a"
    for plot, arguments in [
        (regret_curves_plot, ({},)),
        (race_plot, ([0.0], {})),
        (design_plot, ([1], {}, {}, [])),
    ]:
        with pytest.raises(glb.InputError, match="at least one"):
            plot(*arguments)


@pytest.mark.slow
def test_learnt_features_beat_raw_pixels(script):
    """Quick mode, about a minute of one core: fewer mistakes than OFUGLB-e on pixels, each seed."""
    said = script("neural_digits", "--quick")
    assert re.search(r"saves against raw pixels: .* better in 5 of 5", said)
    assert float(re.findall(r"processor time in all: (\d+) s", said)[0]) < 300.0
