"""``torchglb analyse``: tables, reports, files that grow, input that is wrong."""

import json
import re
import threading
import time

import numpy as np
import pyarrow.feather
import pyarrow.parquet
import pytest
from analyst_tables import clicks
from matplotlib.backends.backend_agg import FigureCanvasAgg

from torchglb.analyse import Follower, read_table
from torchglb.analyse.files import line_of
from torchglb.cli import main
from torchglb.errors import InputError
from torchglb.estimators import running
from torchglb.plotting import forest_plot, running_plot

WORDS = ["--formula", "clicked ~ age + C(arm)", "--family", "bernoulli", "--burn-in", "100"]


@pytest.fixture(autouse=True)
def few_looks(monkeypatch):
    """The picture of intervals over time with three looks instead of forty."""
    monkeypatch.setattr(running, "LOOKS", 3)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "clicks.csv"
    clicks(400).to_csv(path, index=False)
    return path


def result(capsys, *words):
    assert main(["analyse", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_prints_and_writes_what_it_found(table, tmp_path, capsys):
    out = tmp_path / "results"
    words = [*WORDS, "--contrast", "C(arm)[B] - C(arm)[A]", "--out", str(out)]
    assert main(["analyse", str(table), *words]) == 0
    text = capsys.readouterr().out
    assert "C(arm)[T.B]" in text
    assert "C(arm)[B] - C(arm)[A]" in text
    names = {path.name for path in out.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("forest", "running") for kind in ("png", "pdf")}
    assert names == {"analysis.json", "report.html", *pictures}
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r"(src|href)=\"http", page)  # nothing is fetched
    found = json.loads((out / "analysis.json").read_text())
    assert found["rows"][0]["name"] == "Intercept"
    assert found["contrasts"][0]["name"] == "C(arm)[B] - C(arm)[A]"


def test_parquet_and_arrow_files_say_the_same(table, tmp_path, capsys):
    expected = result(capsys, table, *WORDS)["rows"]
    data = pyarrow.Table.from_pandas(read_table(table))
    pyarrow.parquet.write_table(data, tmp_path / "clicks.parquet")
    pyarrow.feather.write_feather(data, tmp_path / "clicks.arrow")
    for name in ("clicks.parquet", "clicks.arrow"):
        assert result(capsys, tmp_path / name, *WORDS)["rows"] == expected


def test_declared_ranges_and_pilots(table, tmp_path, capsys):
    words = ["--formula", "clicked ~ age + C(arm)", "--family", "bernoulli"]
    found = result(capsys, table, *words, "--range", "age=18:90", "--range", "arm=A,B,C")
    assert found["facts"]["scaling"] == "declared ranges"
    pilot = tmp_path / "pilot.csv"
    clicks(50, seed=4).to_csv(pilot, index=False)
    assert result(capsys, table, *words, "--pilot", pilot)["facts"]["rows"] == "400"


def test_declared_levels_that_are_numbers(tmp_path, capsys):
    data = clicks(300)
    data["arm"] = data["arm"].map({"A": 1, "B": 2, "C": 3})
    path = tmp_path / "clicks.csv"
    data.to_csv(path, index=False)
    words = ["--formula", "clicked ~ age + C(arm)", "--family", "bernoulli", "--range", "age=18:90"]
    found = result(capsys, path, *words, "--range", "arm=1,2,3")
    assert {"C(arm)[T.2]", "C(arm)[T.3]"} < {row["name"] for row in found["rows"]}
    assert main(["analyse", str(path), *words, "--range", "arm=1,2"]) == 2
    assert "ranges={'arm': [1, 2, 3]})), got 3 in row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (WORDS[:4], "--burn-in ROWS"),
        ([*WORDS, "--range", "age"], "--range: expected NAME=LOW:HIGH"),
        ([*WORDS, "--range", "age=a:b"], "--range: expected numbers"),
        (["--formula", "clicked ~ agee", *WORDS[2:]], "did you mean 'age'?"),
        ([*WORDS[:3], "gaussian", *WORDS[4:]], "--sigma"),
        ([*WORDS[:3], "binomial", *WORDS[4:]], "--trials"),
        (["--formula", "clicked ~ arm", *WORDS[2:]], "a number (or C(arm) for categories)"),
        (["--formula", "arm ~ age", *WORDS[2:]], "a number (or I(arm == '"),
        (
            ["--formula", "(arm == 'A') ~ age", *WORDS[2:]],
            "got: Unknown operator '='. (arm == 'A') ~ age\n",
        ),
        ([*WORDS, "--contrast", "nope"], "expected a sum of the coefficients"),
        ([*WORDS, "--follow"], "--out"),
        ([*WORDS, "--range", "agee=18:90"], "did you mean 'age'?"),
        ([*WORDS, "--sigma", "2"], "--sigma: expected --family gaussian beside it"),
        ([*WORDS, "--trials", "2"], "--trials: expected --family binomial beside it"),
        ([*WORDS, "--simultaneous"], "--simultaneous: expected --S beside it"),
        ([*WORDS, "--outside", "drop"], "--outside drop: expected --S beside it"),
        ([*WORDS, "--idle", "3"], "--idle: expected --follow beside it"),
        ([*WORDS, "--poll", "-1"], "--poll: expected a positive finite number"),
        ([*WORDS, "--follow", "--idle", "-1"], "--idle: expected a non-negative finite number"),
    ],
)
def test_wrong_words_are_refused(words, message, table, capsys):
    assert main(["analyse", str(table), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("40,A,3.0,5", "line 402: column 'clicked': expected values in [0, 1] (Bernoulli), got 5"),
        ("old,A,3.0,1", "line 402: column 'age': expected a number, got 'old'"),
        (
            ",A,3.0,1",
            "line 402: column 'age': expected a value (or missing='drop', in a shell --mi",
        ),
        ("40,Z,3.0,1", "line 402: column 'arm': expected one of the levels"),
        ("40,A,3.0", "expected 4 cells in line 402, got 3"),
    ],
)
def test_bad_lines_are_named(line, message, table, capsys):
    with table.open("a") as file:
        file.write(line + "\n")
    assert main(["analyse", str(table), *WORDS]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("none.csv", None, "expected a file"),
        ("table.xlsx", b"x", "expected a name that ends in"),
        ("bad.parquet", b"no", "expected a sound .parquet file"),
        ("empty.csv", b"", "names of the columns"),
        ("twice.csv", b"a,a\n1,2\n", "'a' twice"),
        ("semicolons.csv", b"a;b\n1;2\n", "expected commas between the cells, got ';' in line 1"),
        ("latin.csv", b"a,b\n1,\xff\n", "expected UTF-8, got something else in line 2"),
    ],
)
def test_files_that_cannot_be_read(name, data, message, tmp_path):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(path)


def test_a_response_of_words_by_the_formula_that_the_refusal_names(table, capsys):
    numbers = result(capsys, table, *WORDS)["rows"]
    data = clicks(400)
    data["clicked"] = np.where(data["clicked"] == 1, "yes", "no")
    data.to_csv(table, index=False)
    words = ["--formula", WORDS[1].replace("clicked", "I(clicked == 'yes')"), *WORDS[2:]]
    assert result(capsys, table, *words)["rows"] == numbers


def test_every_option_says_what_it_is_for(capsys):
    with pytest.raises(SystemExit):
        main(["analyse", "--help"])
    parts = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert len(parts) > 20
    assert all(re.search(r"\s{2,}\w", part) for part in parts), parts


def test_lines_of_rows_that_span_several():
    data = b'a,b\n1,"x\ny"\n\n2,z\n'
    assert [line_of(data, row) for row in (0, 1, 2)] == [3, 5, None]


def test_names_are_escaped_in_the_report(tmp_path, capsys):
    data = clicks(300).rename(columns={"age": "<img src=x>"})
    path = tmp_path / "<b>.csv"
    data.to_csv(path, index=False)
    formula = "clicked ~ `<img src=x>`"
    words = ["--formula", formula, *WORDS[2:], "--out", str(tmp_path / "out")]
    assert main(["analyse", str(path), *words]) == 0
    capsys.readouterr()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page
    assert "<b>" not in page


# ---- a file that grows ---------------------------------------------------------------------------


def follow(table, out, capsys, idle="0.2"):
    words = [*WORDS, "--follow", "--poll", "0.05", "--idle", idle, "--out", str(out), "--json"]
    code = main(["analyse", str(table), *words])
    said = capsys.readouterr()
    return code, [json.loads(line) for line in said.out.splitlines()], said.err


def test_a_category_stays_one_of_words_where_new_lines_look_like_numbers(tmp_path, capsys):
    data = clicks(300)
    data["arm"] = data["arm"].map({"A": "1", "B": "2", "C": "placebo"})
    data = data.iloc[np.argsort(data["arm"].to_numpy() != "placebo", kind="stable")]
    data = data.iloc[np.r_[0:60, 240:300, 60:240]]  # the last rows have no word among their arms
    lines = data.to_csv(index=False).splitlines(keepends=True)
    assert not any("placebo" in line for line in lines[-100:])
    table, out = tmp_path / "clicks.csv", tmp_path / "out"
    table.write_text("".join(lines[:-100]))

    def grow():
        time.sleep(0.6)
        with table.open("a") as file:
            file.write("".join(lines[-100:]))

    writer = threading.Thread(target=grow)
    writer.start()
    code, found, error = follow(table, out, capsys, idle="3")
    writer.join()
    assert (code, error) == (0, "")
    assert found[-1]["facts"]["rows"].startswith("200 ")


def test_a_file_that_grows_is_followed(tmp_path, capsys):
    lines = clicks(400).to_csv(index=False).splitlines(keepends=True)
    table, out = tmp_path / "clicks.csv", tmp_path / "out"
    table.write_text("".join(lines[:50]))  # too few for the burn-in: waited for

    def grow():
        for part in (
            lines[50:250],
            [*lines[250:300], lines[300][:5]],
            [lines[300][5:], *lines[301:]],
        ):
            time.sleep(0.6)
            with table.open("a") as file:
                file.write("".join(part))

    writer = threading.Thread(target=grow)
    writer.start()
    code, found, _ = follow(table, out, capsys, idle="3")
    writer.join()
    assert code == 0
    rows = [int(look["facts"]["rows"].split()[0]) for look in found]
    assert rows[-1] == 300
    assert rows == sorted(rows)
    assert json.loads((out / "follow.json").read_text())["size"] == table.stat().st_size
    whole = result(capsys, table, *WORDS)["rows"]
    for one, other in zip(found[-1]["rows"], whole, strict=True):
        assert one["lower"] == pytest.approx(other["lower"], rel=1e-6)


@pytest.mark.slow  # a file that grows, above, has such a line too
def test_a_half_written_line_is_waited_for(tmp_path, capsys):
    table, out = tmp_path / "clicks.csv", tmp_path / "out"
    text = clicks(300).to_csv(index=False)
    table.write_text(text + "40,A,1.0")  # the click has not been written yet
    code, found, _ = follow(table, out, capsys)
    assert code == 0
    assert found[-1]["facts"]["rows"].startswith("200 ")
    with table.open("a") as file:
        file.write(",1\n")
    code, found, _ = follow(table, out, capsys)  # an interrupted watch goes on
    assert found[-1]["facts"]["rows"].startswith("201 ")


@pytest.mark.parametrize("edit", ["changed", "vanished", "gone"])
def test_rows_that_change_or_vanish_are_an_error(edit, tmp_path, capsys):
    table, out = tmp_path / "clicks.csv", tmp_path / "out"
    text = clicks(300).to_csv(index=False)
    table.write_text(text)
    assert follow(table, out, capsys)[0] == 0
    before = (out / "analysis.json").read_bytes()
    if edit == "gone":
        table.unlink()
    else:
        lines = text.splitlines(keepends=True)
        if edit == "changed":
            lines[7] = lines[7].replace(lines[7][0], "9" if lines[7][0] != "9" else "8", 1)
        table.write_text("".join(lines if edit == "changed" else lines[:-1]))
    code, found, error = follow(table, out, capsys)
    assert code == 2
    assert {"changed": "have changed", "vanished": "have vanished", "gone": "got none"}[
        edit
    ] in error
    assert (out / "analysis.json").read_bytes() == before  # nothing is lost


def test_a_bad_new_row_is_named_by_its_line_in_the_file(tmp_path, capsys):
    table, out = tmp_path / "clicks.csv", tmp_path / "out"
    table.write_text(clicks(300).to_csv(index=False))

    def grow():
        time.sleep(0.5)
        with table.open("a") as file:
            file.write("40,A,1.0,1\n40,A,1.0,3\n")

    writer = threading.Thread(target=grow)
    writer.start()
    code, _, error = follow(table, out, capsys, idle="5")
    writer.join()
    assert code == 2
    assert "line 303: column 'clicked'" in error


def test_the_memory_of_another_watch_is_refused(tmp_path):
    memory = tmp_path / "follow.json"
    memory.write_text('{"file": "other.csv", "size": 1, "sha256": "x"}')
    with pytest.raises(InputError, match="a watch of 'clicks.csv', got 'other.csv'"):
        Follower(tmp_path / "clicks.csv", memory)
    memory.write_text("[]")
    with pytest.raises(InputError, match="what an earlier watch wrote"):
        Follower(tmp_path / "clicks.csv", memory)


def test_figures_keep_their_titles_inside():
    names = ["a rather long name of a coefficient, with $dollars$ and more", "x"]
    ends = [np.array([0.5, -np.inf]), np.array([2.0, 1e-3])]
    forest = forest_plot(names, np.array([1.0, 0.0]), *ends, *ends)
    looks = [np.tile(end, (5, 1)) for end in (np.array([1.0, 0.0]), *ends, *ends)]
    running = running_plot(np.arange(1, 6) * 10, names, *looks)
    for figure in (forest, running):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        width, height = figure.get_size_inches() * figure.dpi
        for axis in figure.axes:
            for label in (axis.title, axis.yaxis.label, axis.xaxis.label):
                if label.get_text() and axis.get_visible():
                    box = label.get_window_extent(renderer)
                    assert min(box.x0, box.y0) >= 0
                    assert box.x1 <= width
                    assert box.y1 <= height
