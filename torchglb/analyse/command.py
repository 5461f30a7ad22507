"""The command ``torchglb analyse``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchglb.analyse.files import line_of, parse_csv, read_table
from torchglb.analyse.follow import Follower
from torchglb.checks import check_positive, check_tolerance
from torchglb.errors import InputError
from torchglb.estimators import GLMFit, Scaler, TableError, glm
from torchglb.estimators.packages import needed
from torchglb.estimators.tables import Table
from torchglb.families import Binomial, Gaussian, GLMFamily
from torchglb.report.analysis import write_analysis
from torchglb.simulate.files import write_bytes

Say = Callable[[object], None]


def add_command(commands: Any, say: Say) -> argparse.Action:
    """Adds the command to a parser; returns the argument that is a directory.

    Example:
        >>> import argparse
        >>> parser = argparse.ArgumentParser()
        >>> _ = add_command(parser.add_subparsers(), print)
        >>> words = ["analyse", "a.csv", "--formula", "y ~ x", "--family", "bernoulli"]
        >>> parser.parse_args(words).delta
        0.05
    """
    parser = commands.add_parser(
        "analyse",
        help="intervals and tests for a table, which survive peeking",
        description="Fits a generalized linear model to a CSV, Parquet or Arrow file. Rows are in"
        " the order in which they came.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=lambda given: analyse(given, say))
    parser.add_argument("file", help="CSV, Parquet or Arrow")
    parser.add_argument("--formula", required=True, help="such as 'clicked ~ age + C(arm)'")
    parser.add_argument("--family", required=True, help="bernoulli, poisson, gaussian or binomial")
    parser.add_argument("--sigma", type=float, help="noise of Gaussian responses")
    parser.add_argument("--trials", type=int, help="of binomial responses")
    parser.add_argument("--delta", type=float, default=0.05, help="one minus the coverage")
    parser.add_argument("--burn-in", type=int, metavar="ROWS", help="rows that give the scale")
    parser.add_argument("--pilot", metavar="FILE", help="another table that gives the scale")
    parser.add_argument(
        "--range",
        action="append",
        default=[],
        metavar="NAME=LOW:HIGH",
        help="a declared range, or NAME=a,b,c for levels",
    )
    parser.add_argument("--S", type=float, help="a bound on |x'beta|, as in torchglb.glm")
    parser.add_argument(
        "--outside",
        choices=("refuse", "drop"),
        default="refuse",
        help="with --S: rows beyond the region of the scale",
    )
    parser.add_argument("--radius", help="of the confidence sequence")
    parser.add_argument("--weights", metavar="COLUMN", help="of the rows, in [0, 1]")
    parser.add_argument("--offset", metavar="COLUMN", help="whose coefficient is 1")
    parser.add_argument("--time", metavar="COLUMN", help="by which rows are ordered")
    parser.add_argument(
        "--missing",
        choices=("refuse", "drop"),
        default="refuse",
        help="rows with an empty cell; drop: only if that does not depend on the response",
    )
    parser.add_argument(
        "--intervals",
        choices=("anytime", "profile", "both"),
        default="anytime",
        help="profile: for one look at a sample that was fixed beforehand",
    )
    parser.add_argument(
        "--simultaneous", action="store_true", help="with --S: all intervals from the joint set"
    )
    parser.add_argument(
        "--contrast",
        action="append",
        default=[],
        metavar="SUM",
        help="a sum of coefficients, such as 'C(arm)[B] - C(arm)[A]'; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on as the CSV file grows, by rows whose delay does not depend on the response",
    )
    parser.add_argument(
        "--poll", type=float, default=2.0, metavar="SECONDS", help="with --follow, between looks"
    )
    parser.add_argument(
        "--idle", type=float, metavar="SECONDS", help="with --follow, end after so long at rest"
    )
    out: argparse.Action = parser.add_argument("--out", help="directory of the report and figures")
    return out


def analyse(given: argparse.Namespace, say: Say) -> int:
    r"""Fits, prints, writes; follows the file if asked to.

    Example:
        >>> import argparse
        >>> _ = Path("a.csv").write_text("x,y\n" + "1,0\n2,1\n3,1\n" * 40)
        >>> parser = argparse.ArgumentParser()
        >>> _ = add_command(parser.add_subparsers(), print)
        >>> words = ["analyse", "a.csv", "--formula", "y ~ x", "--family", "bernoulli"]
        >>> given = parser.parse_args([*words, "--burn-in", "20"])
        >>> analyse(given, say=lambda *text: None)
        0
    """
    _check_options(given)
    path = Path(given.file)
    if given.follow:
        return _follow(given, path, say)
    try:
        fit = _fitted(given, read_table(path))
    except TableError as error:
        raise _with_line(error, path, None) from None
    _publish(given, fit, path, say)
    return 0


# ---- what is asked -------------------------------------------------------------------------------


def _check_options(given: argparse.Namespace) -> None:
    """Refuses what would have no effect."""
    needs = (
        ("--sigma", given.sigma is not None, "--family gaussian", given.family == "gaussian"),
        ("--trials", given.trials is not None, "--family binomial", given.family == "binomial"),
        ("--outside drop", given.outside == "drop", "--S", given.S is not None),
        ("--simultaneous", given.simultaneous, "--S", given.S is not None),
        ("--idle", given.idle is not None, "--follow", given.follow),
    )
    for option, is_given, other, is_there in needs:
        if is_given and not is_there:
            raise InputError(f"{option}: expected {other} beside it, got none")
    check_positive("--poll", given.poll)
    if given.idle is not None:
        check_tolerance("--idle", given.idle)


def _family(given: argparse.Namespace) -> str | GLMFamily:
    if given.family == "gaussian":
        if given.sigma is None:
            raise InputError("--sigma: expected the noise of Gaussian responses, got none")
        return Gaussian(given.sigma)
    if given.family == "binomial":
        if given.trials is None:
            raise InputError("--trials: expected the trials of binomial responses, got none")
        return Binomial(given.trials)
    return str(given.family)


def _scaler(given: argparse.Namespace, table: Table) -> Scaler:
    ranges: dict[str, Any] = {}
    for text in given.range:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"--range: expected NAME=LOW:HIGH or NAME=a,b,c, got {text!r}")
        ranges[name] = _range(text, value)
        if name in table.columns and not table.is_text(name) and isinstance(ranges[name], list):
            ranges[name] = [_value(word) for word in ranges[name]]
    pilot = None if given.pilot is None else read_table(Path(given.pilot))
    if given.burn_in is None and pilot is None and not ranges:
        raise InputError(
            "expected a scale that does not look at the evidence: --burn-in ROWS, --pilot FILE or"
            " --range NAME=LOW:HIGH for every column, got none"
        )
    return Scaler(ranges=ranges, burn_in=given.burn_in, pilot=pilot, outside=given.outside)


def _range(text: str, value: str) -> Any:
    low, colon, high = value.partition(":")
    try:
        if colon:
            return float(low), float(high)
    except ValueError:
        raise InputError(f"--range: expected numbers LOW:HIGH, got {text!r}") from None
    return value.split(",")


def _value(word: str) -> Any:
    """A level as a column without words has it: a number, True or False."""
    if word in ("True", "False"):
        return word == "True"
    try:
        number = float(word)
    except ValueError:
        return word
    return int(number) if number.is_integer() else number


def _fitted(given: argparse.Namespace, data: Any) -> GLMFit:
    return glm(
        given.formula,
        data,
        family=_family(given),
        delta=given.delta,
        scaler=_scaler(given, Table(data)),
        S=given.S,
        radius=given.radius,
        intervals=given.intervals,
        weights=given.weights,
        offset=given.offset,
        time=given.time,
        missing=given.missing,
        rank="allow" if given.follow else "refuse",
    )


def _with_line(error: TableError, path: Path, data: bytes | None) -> InputError:
    """The same with the line of a CSV file."""
    if error.row is None:
        return InputError(f"{path}: {error}")
    if path.suffix.lower() != ".csv":
        return InputError(f"{path}: {error}")
    line = line_of(path.read_bytes() if data is None else data, error.row)
    return InputError(f"{path}, line {line}: {error}")


# ---- what is answered ----------------------------------------------------------------------------


def _publish(given: argparse.Namespace, fit: GLMFit, path: Path, say: Say) -> None:
    """Prints the tables, and writes report, figures and JSON."""
    summary = fit.summary(simultaneous=given.simultaneous)
    contrasts = None
    if given.contrast:
        contrasts = fit.contrast(*given.contrast, simultaneous=given.simultaneous)
    table = {"file": path.name, **summary.to_dict()}
    if contrasts is not None:
        table["contrasts"] = contrasts.to_dict()["rows"]
    text = json.dumps(table, ensure_ascii=False)
    if given.json:
        say(text)
    else:
        say(summary)
        if contrasts is not None:
            say("")
            say(str(contrasts).partition("\n\n")[2])
    if given.out is None:
        return
    out = Path(given.out)
    figures = _figures(fit)
    write_bytes(out / "analysis.json", (text + "\n").encode())
    written = [write_analysis(out / "report.html", path.name, summary, contrasts, figures)]
    for name, figure in figures.items():
        for kind in ("png", "pdf"):
            target = out / f"{name}.{kind}"
            beside = target.with_name(f".{target.name}.part")
            figure.savefig(beside, format=kind, dpi=150)
            beside.replace(target)
            written.append(target)
    if not given.json:
        for target in written:
            say(target)


def _figures(fit: GLMFit) -> dict[str, Any]:
    try:
        needed("matplotlib", "plot")
    except InputError as error:
        print(f"no figures: {error}", file=sys.stderr)
        return {}
    return {"forest": fit.plot(), "running": fit.plot_running()}


# ---- following -----------------------------------------------------------------------------------


def _follow(given: argparse.Namespace, path: Path, say: Say) -> int:
    if path.suffix.lower() != ".csv":
        raise InputError(f"--follow: expected a .csv file, got {path.name!r}")
    if given.out is None:
        raise InputError("--follow: expected --out, where the watch is remembered, got none")
    follower = Follower(path, Path(given.out) / "follow.json")
    fit: GLMFit | None = None
    taken, rested = 0, 0.0
    while True:
        lines = follower.look()
        if lines is not None and len(lines) > taken:
            try:
                fit, taken = _grown(given, fit, lines, taken, path)
            except TableError as error:
                raise _with_line(error, path, lines) from None
            if fit is not None:
                _publish(given, fit, path, say)
                follower.remember(lines[:taken])
            rested = 0.0
        elif given.idle is not None and rested >= given.idle:
            return 0
        time.sleep(given.poll)
        rested += given.poll


def _grown(
    given: argparse.Namespace, fit: GLMFit | None, lines: bytes, taken: int, path: Path
) -> tuple[GLMFit | None, int]:
    """The fit with the new lines; None while there are too few for the burn-in."""
    head = lines[: lines.find(b"\n") + 1]
    if fit is None:
        data = parse_csv(lines, str(path))
        if len(data) <= (given.burn_in or 0):
            return None, taken
        return _fitted(given, data), len(lines)
    rows = lines[:taken].count(b"\n")
    try:
        new = parse_csv(head + lines[taken:], str(path), fit.columns_of_words)
        return fit.update(new), len(lines)
    except TableError as error:
        if error.row is not None:  # counted from the first new line: the whole file is meant
            error.row += rows - 1
        raise
