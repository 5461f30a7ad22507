"""The sheet of all presets: which run of a preset is shown, and that every name is on it."""

import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
plt = pytest.importorskip("matplotlib.pyplot")

import contact_sheet  # noqa: E402


def run_of(name, quick, **changes):
    """What a record says of itself."""
    return SimpleNamespace(config=asdict(contact_sheet.expected(name, quick)) | changes)


def test_a_run_in_full_comes_before_a_quick_one():
    quick, full = run_of("figure1", True), run_of("figure1", False)
    other, short = run_of("figure2", False), run_of("figure1", False, horizon=5000)
    assert contact_sheet.found("figure1", [other, quick, full]) == ("in full", full)
    assert contact_sheet.found("figure1", [short, quick, other]) == ("quick", quick)
    assert contact_sheet.found("figure1", [other, short]) is None


def test_what_is_no_finished_run_is_passed_over(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text.txt").write_text("no run")
    assert list(contact_sheet.records([tmp_path, tmp_path / "notes"])) == []


def test_every_picture_is_on_the_sheet_beneath_its_name(tmp_path):
    pictures = {}
    for count, name in enumerate(("high (quick)", "flat (in full)", "a", "b"), start=1):
        pictures[name] = tmp_path / f"{count}.png"
        height = 60 if name == "high (quick)" else 20
        plt.imsave(pictures[name], np.full((height, 40, 3), 0.2 * count))
    figure = contact_sheet.sheet(pictures)
    shown = [axis.get_title() for axis in figure.axes if axis.get_images()]
    assert shown == ["flat (in full)", "a", "b", "high (quick)"]
