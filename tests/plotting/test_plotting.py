"""The figures of a record: what is drawn, with which colours, and where the files are."""

import itertools
from unittest import mock

import matplotlib.text
import numpy as np
import pytest
from fake_records import PAPER, fake_record
from matplotlib.figure import Figure

from torchglb import policies
from torchglb.errors import InputError
from torchglb.plotting import POLICY_STYLE, figures, save_figures, styles
from torchglb.plotting.confidence import Sets, set_panel
from torchglb.plotting.experiment import far_off, leading
from torchglb.plotting.style import Style
from torchglb.simulate import Record

# ---- colours ---------------------------------------------------------------------------------

#: what people without red (protan) or green (deutan) cones see, for linear RGB (Machado et al. 2009)
SIGHT = {
    "full": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}


def lab(color: str, sight: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of `#rrggbb`."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(sight @ linear, 0, 1)
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ linear
    )
    t = xyz / np.array([0.95047, 1.0, 1.08883])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(a: str, b: str, sight: str) -> float:
    return float(np.linalg.norm(lab(a, SIGHT[sight]) - lab(b, SIGHT[sight])))


def test_every_policy_has_a_style_of_its_own():
    known = {*policies.available(), *policies.available(pairs=True)}
    assert set(POLICY_STYLE) == known
    assert len({style.color for style in POLICY_STYLE.values()}) == len(POLICY_STYLE)
    assert len({style.name for style in POLICY_STYLE.values()}) == len(POLICY_STYLE)


@pytest.mark.parametrize("sight", SIGHT)
def test_the_colours_of_the_paper_are_told_apart(sight):
    """Far apart as colours, or at least visible as different together with different lines."""
    for a, b in itertools.combinations((POLICY_STYLE[name] for name in PAPER), 2):
        far = distance(a.color, b.color, sight)
        assert far > 20 or (far > 8 and a.linestyle != b.linestyle), (a.name, b.name, far)


@pytest.mark.parametrize("sight", SIGHT)
def test_no_two_policies_look_alike(sight):
    for a, b in itertools.combinations(POLICY_STYLE.values(), 2):
        far = distance(a.color, b.color, sight)
        assert far > 10 or a.linestyle != b.linestyle, (a.name, b.name, far)


def test_labels_keep_the_colour_of_their_policy_and_never_share_one():
    labels = ["emk", "emk-vaw", "mine", "other", *(f"emk-{i}" for i in range(30))]
    found = styles(labels, dict.fromkeys(labels, "emk") | {"mine": "ts", "other": "ts"})
    assert found["emk"] == POLICY_STYLE["emk"]
    assert found["emk-vaw"].name == "EMK (vaw)"
    assert found["mine"].color == POLICY_STYLE["ts"].color
    assert found["mine"].name == "mine"
    assert len({style.color for style in found.values()}) == len(labels)
    assert found == styles(labels, dict.fromkeys(labels, "emk") | {"mine": "ts", "other": "ts"})


# ---- figures ---------------------------------------------------------------------------------


def curves(axis, style):
    return [
        line for line in axis.lines if line.get_color() == style.color and len(line.get_xdata()) > 1
    ]


def test_the_layout_of_the_paper(tmp_path):
    record = Record.open(fake_record(tmp_path, S=(4.0, 6.0, 8.0, 10.0), replicates=3))
    figure = figures(record)["regret"]
    assert len(figure.axes) == 12
    assert all(len(axis.child_axes) == 1 for axis in figure.axes[8:])  # a window on the small sets
    top, magnified, sets = (figure.axes[4 * row : 4 * row + 4] for row in range(3))
    assert [axis.get_title() for axis in top] == ["$S = 4$", "$S = 6$", "$S = 8$", "$S = 10$"]
    for column, axis in enumerate(top):
        for label in PAPER:
            (line,) = curves(axis, POLICY_STYLE[label])
            regret = record.arrays(label)["regret"][column]
            np.testing.assert_allclose(line.get_ydata(), regret.mean(0))
        band = axis.collections[-1].get_paths()[0].vertices  # the best one is drawn last
        best = record.arrays("ofuglb-pb")["regret"][column]
        np.testing.assert_allclose(band[:, 1].max(), (best.mean(0) + best.std(0, ddof=1)).max())
    for axis in magnified:
        assert curves(axis, POLICY_STYLE["ofuglb"])
        assert not curves(axis, POLICY_STYLE["rs-glincb"])
    for column, axis in enumerate(sets):
        (outline,) = curves(axis, POLICY_STYLE["emk"])
        boundary = record.arrays("emk")["boundary"][column]
        np.testing.assert_allclose(outline.get_xydata()[:-1], boundary)
        assert not curves(axis, POLICY_STYLE["evill"])


def test_the_legend_names_every_policy_and_hides_no_curve(tmp_path):
    drawn = figures(Record.open(fake_record(tmp_path, S=(4.0,))))
    for figure in drawn.values():
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert not any(box.overlaps(axis.get_window_extent()) for axis in figure.axes)
    names = [text.get_text() for text in drawn["regret"].legends[0].texts]
    assert {POLICY_STYLE[label].name for label in PAPER} <= set(names)


def texts(figure):
    """Everything that is written when a figure is drawn, with its box."""
    found = []

    def record(text, renderer):
        if text.get_visible() and text.get_text().strip():
            found.append((text.get_text(), text.get_window_extent(renderer)))

    figure.draw_without_rendering()  # the layout is found in a first go, and kept
    figure.set_layout_engine("none")
    with mock.patch.object(matplotlib.text.Text, "draw", record):
        figure.draw_without_rendering()
    return found


def assert_readable(figure):
    """No text leaves the canvas, and no two overlap."""
    canvas, found = figure.bbox, texts(figure)
    assert len(found) > 3
    for text, box in found:
        inside = canvas.x0 - 1 <= box.x0 and box.x1 <= canvas.x1 + 1
        assert inside, (text, box)
        assert canvas.y0 - 1 <= box.y0 <= box.y1 <= canvas.y1 + 1, (text, box)
    for (one, a), (two, b) in itertools.combinations(found, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 0.5 or high <= 0.5, (one, two)


LONG = "A title that nobody could read to its end if it were cut where the picture ends, " * 3


ONE, FOUR = (4.0,), (4.0, 6.0, 8.0, 10.0)
TITLES = ["Short", LONG, "x" * 300, r"$\frac{$", "100 % of $5"]
OTHERS = [pytest.param(t, FOUR, marks=pytest.mark.slow) for t in TITLES if t != LONG]
OTHERS.append(pytest.param(r"$ \alpha_{", ONE, marks=pytest.mark.slow))


@pytest.mark.parametrize(("title", "S"), [*((t, ONE) for t in TITLES), (LONG, FOUR), *OTHERS])
def test_titles_are_wrapped_and_taken_as_they_are(tmp_path, title, S):
    record = Record.open(fake_record(tmp_path, PAPER[:3], S=S, title=title))
    for kind, figure in figures(record).items():
        assert_readable(figure)
        if kind != "time":
            shown = figure.get_suptitle().replace("\n", "").replace(" ", "")
            assert title.replace(" ", "") in shown


TWO, ONE_LABEL = ("ofuglb", "random"), ("oracle",)
MANY = (*PAPER, "glm-ucb", "gloc", "ol2m", "ts", "greedy")
SLOW = [pytest.param(2, labels, marks=pytest.mark.slow) for labels in (PAPER, TWO)]
WITHOUT_SETS = [
    pytest.param(5, labels, marks=pytest.mark.slow) for labels in (PAPER, ONE_LABEL, MANY)
]


@pytest.mark.parametrize(
    ("dim", "labels"),
    [*SLOW, (2, ONE_LABEL), (2, MANY), (5, TWO), *WITHOUT_SETS],
)
def test_no_text_leaves_the_canvas_or_another_one(tmp_path, dim, labels):
    record = Record.open(fake_record(tmp_path, labels, S=(4.0, 6.0, 8.0, 10.0), dim=dim))
    for figure in figures(record).values():
        assert_readable(figure)


def test_notes_are_never_on_a_curve(tmp_path):
    """What is off the scale is named above its panel."""
    record = Record.open(
        fake_record(tmp_path, ("ofuglb", "emk", "evill", "random"), S=(4.0,), far=500.0)
    )
    figure = figures(record)["regret"]
    assert_readable(figure)
    axis = figure.axes[0]
    (note,) = [text for text in axis.texts if "ends at" in text.get_text()]
    assert note.get_window_extent().y0 >= axis.get_window_extent().y1
    assert curves(axis, POLICY_STYLE["random"])[0].get_ydata().max() > axis.get_ylim()[1]


def test_the_magnified_row_is_there_only_if_it_shows_something_else(tmp_path):
    few = Record.open(fake_record(tmp_path / "few", ("ofuglb", "emk", "evill"), S=(4.0, 6.0)))
    assert len(figures(few)["regret"].axes) == 4  # regret and sets, for each S
    more = Record.open(
        fake_record(tmp_path / "more", ("ofuglb", "emk", "evill", "rs-glincb"), S=(4.0, 6.0))
    )
    assert len(figures(more)["regret"].axes) == 6


def test_curves_that_coincide_are_marked(tmp_path):
    directory = fake_record(tmp_path, ("ofuglb", "emk", "evill"), S=(4.0,))
    (directory / "emk.npz").write_bytes((directory / "ofuglb.npz").read_bytes())
    axis = figures(Record.open(directory))["regret"].axes[0]
    marked = {line.get_color() for line in axis.lines if line.get_marker() != "None"}
    assert marked == {POLICY_STYLE["ofuglb"].color, POLICY_STYLE["emk"].color}


def test_a_set_larger_than_the_window_keeps_an_edge(tmp_path):
    directory = fake_record(tmp_path, ("ofuglb", "emk"), S=(4.0,))
    arrays = dict(np.load(directory / "emk.npz"))
    arrays["boundary"] = 100.0 * (arrays["boundary"] - arrays["theta_star"][:, :1])
    np.savez(directory / "emk.npz", **arrays)
    panel = figures(Record.open(directory))["regret"].axes[-1]
    for axis in (panel, *panel.child_axes):
        (outline,) = curves(axis, POLICY_STYLE["emk"])
        x, y = outline.get_xydata().T
        assert axis.get_xlim()[0] < x.min() < x.max() < axis.get_xlim()[1]
        assert axis.get_ylim()[0] < y.min() < y.max() < axis.get_ylim()[1]


def test_only_what_is_above_the_median_goes_off_the_scale():
    finals = {"a": 1.0, "b": 1.2, "c": 100.0, "d": 110.0, "e": 120.0}
    assert far_off(finals) == []  # else three of five would be cut
    assert far_off({"a": 1.0, "b": 1.2, "c": 100.0}) == ["c"]
    assert far_off({"a": 1.0, "b": 1.2, "c": 1.4, "d": 110.0, "e": 120.0}) == ["d", "e"]


def test_files(tmp_path):
    record = Record.open(fake_record(tmp_path / "run", PAPER[:2], S=(4.0,), name="figure1"))
    paths = save_figures(record, tmp_path / "a" / "b")
    assert [path.name for path in paths] == [
        "figure1.png", "figure1.pdf", "figure1-certificate.png", "figure1-certificate.pdf",
        "figure1-time.png", "figure1-time.pdf",
    ]  # fmt: skip
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"%PDF")


def test_without_sets_there_are_two_rows(tmp_path):
    record = Record.open(fake_record(tmp_path, dim=5, S=(4.0,)))
    assert len(figures(record)["regret"].axes) == 2


def test_one_replicate_one_policy_and_unknown_truth(tmp_path):
    """Datasets know no theta*; a single run has no spread."""
    directory = fake_record(tmp_path, labels=("ofuglb",), S=(4.0,), replicates=1)
    arrays = dict(np.load(directory / "ofuglb.npz"))
    del arrays["theta_star"]
    np.savez(directory / "ofuglb.npz", **arrays)
    drawn = figures(Record.open(directory))
    assert len(drawn["regret"].axes) == 2  # nothing to magnify
    for figure in drawn.values():
        figure.draw_without_rendering()


def test_a_set_without_end_is_left_out(tmp_path):
    directory = fake_record(tmp_path, labels=("ofuglb", "emk"), S=(4.0,))
    arrays = dict(np.load(directory / "emk.npz"))
    arrays["boundary"][0, 0] = np.inf
    np.savez(directory / "emk.npz", **arrays)
    sets = figures(Record.open(directory))["regret"].axes[-1]
    assert not curves(sets, POLICY_STYLE["emk"])
    assert curves(sets, POLICY_STYLE["ofuglb"])


def test_an_empty_record_is_refused(tmp_path):
    directory = fake_record(tmp_path, labels=("ofuglb",))
    (directory / "ofuglb.npz").unlink()
    with pytest.raises(InputError, match="at least one finished policy"):
        save_figures(Record.open(directory), tmp_path)


def test_far_off():
    finals = {"a": 10.0, "b": 30.0, "c": 100.0, "d": 4000.0, "e": 5000.0}
    assert far_off(finals) == ["d", "e"]
    assert far_off({"a": 10.0, "b": 30.0, "c": 100.0}) == []
    assert far_off({"oracle": 0.0, "a": 10.0, "b": 1000.0}) == ["b"]
    assert far_off({"oracle": 0.0, "a": 10.0}) == []  # a curve beside which nothing is hidden


def test_leading():
    finals = {"a": 10.0, "b": 29.0, "c": 31.0, "d": 400.0}
    assert leading(finals) == ["a", "b", "c"]  # three at least
    assert leading(finals | {"e": 30.0}) == ["a", "b", "e"]
    assert leading({"oracle": 0.0}, {"oracle"}) == ["oracle"]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_window_hides_no_estimate(hidden):
    angle = np.linspace(0.0, 2.0 * np.pi, 60)
    circle = np.stack([np.cos(angle), np.sin(angle)], -1)
    corners = [np.array([x, y]) for x in (-3.5, 3.5) for y in (-3.5, 3.5)]
    names = ["large", "small", *(f"c{i}" for i in range(4))]
    style = {name: Style(name, "#000000") for name in names}
    outlines = {"large": 4.0 * circle, "small": 0.2 * circle}
    centers = {"small": np.zeros(2)}
    if hidden:
        centers |= {f"c{i}": corner for i, corner in enumerate(corners)}
        outlines |= {f"c{i}": corner + 2.0 * circle for i, corner in enumerate(corners)}
    axis = Figure().subplots()
    set_panel(axis, Sets(outlines, centers, None, 6.0, style))
    assert len(axis.child_axes) == (0 if hidden else 1)
