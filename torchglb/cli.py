"""The command line: ``torchglb run figure1``."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import shtab

from torchglb import environments, policies
from torchglb import report as reports
from torchglb.analyse import add_command
from torchglb.errors import InputError, RunError, SolverError
from torchglb.plugins import load_plugins
from torchglb.preferences import leaderboard
from torchglb.random_streams import GENERATOR
from torchglb.report.tables import aligned
from torchglb.simulate import (
    Configuration,
    Record,
    find_preset,
    lay_over,
    presets,
    read_table,
    run,
)
from torchglb.simulate.progress import Display

#: exit codes: something went wrong; a wrong command, key or value; stopped by Ctrl-C
FAILED, WRONG, INTERRUPTED = 1, 2, 130
#: flags that stand for a key of the configuration: what they are called and what they do
KEYS = {
    "policies": "labels, separated by commas",
    "S": "radii of the ball, separated by commas",
    "horizon": "rounds",
    "replicates": "repeats for each S",
    "seed": "of everything random",
    "delta": "failure level",
    "device": "of the tensors",
}


class ReaderGone(Exception):
    """Whoever reads the output, such as head, has seen enough."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, or 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = _parser().parse_args(words)
    given.again = shlex.join(["torchglb", *words])
    try:
        load_plugins(given.modules)
        return int(given.command(given) or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InputError as error:
        print(f"torchglb: {error}", file=sys.stderr)
        return WRONG
    except ReaderGone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, RunError, SolverError) as error:
        print(f"torchglb: {error}", file=sys.stderr)
        return FAILED


def _say(text: object) -> None:
    """Prints. Only here a broken pipe is no error: elsewhere it means that something is lost."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise ReaderGone from None


def _version() -> str:
    parts = {name: _version_of(name) for name in ("torchglb", "torch", "numpy", "numba")}
    parts |= {"python": platform.python_version(), "random numbers": GENERATOR}
    return ", ".join(f"{name} {version}" for name, version in parts.items())


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a source tree that was not installed
        return "unknown"


#: how a shell completes presets: names, and TOML files
_PRESET = {"bash": "_torchglb_presets", "zsh": "_torchglb_presets", "tcsh": "f:*.toml"}
_COMPLETE_PRESETS = {
    "bash": """_torchglb_presets() {{
  compgen -W "{names}" -- "$1"
  compgen -d -- "$1"
  compgen -f -X '!*.toml' -- "$1"
}}""",
    "zsh": """_torchglb_presets() {{
  compadd -- {names}
  _files -g '*.toml'
}}""",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchglb",
        description="Generalized linear models and bandits: analyses, experiments, reports.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    own = "a module that registers policies or environments of yours; may be given again"
    parser.add_argument(
        "--import", action="append", default=[], dest="modules", metavar="MODULE", help=own
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="run an experiment, continue it, or extend it", allow_abbrev=False
    )
    run.set_defaults(command=_run)
    preset = run.add_argument("preset", help="a preset (see `torchglb list`) or a TOML file")
    preset.complete = _PRESET  # type: ignore[attr-defined]
    run.add_argument("--quick", action="store_true", help="a small version of it")
    for key, text in KEYS.items():
        run.add_argument(f"--{key}", help=text)
    run.add_argument(
        "--arms-per-replicate",
        action="store_true",
        help="draw arms for each replicate (shared_arms = false); else all see the same",
    )
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the preset"
    )
    run.add_argument(
        "--import", action="append", default=[], dest="imports", metavar="MODULE", help=own
    )
    run.add_argument("--executor", default="processes", help="serial, processes (default) or ray")
    run.add_argument("--workers", type=int, help="worker processes; the number of cores by default")
    run.add_argument("--address", help="of the Ray cluster")
    run.add_argument(
        "--save-every", type=float, default=20.0, metavar="SECONDS", help="checkpoints"
    )
    out = run.add_argument("--out", help="directory of the results; results/NAME by default")
    directories = [out]

    plot = commands.add_parser("plot", help="draw the figures of a run")
    plot.set_defaults(command=_plot)
    directories.append(plot.add_argument("directory"))
    report = commands.add_parser("report", help="write the report of a run, one HTML file")
    report.set_defaults(command=_report)
    directories.append(report.add_argument("directory"))
    compare = commands.add_parser("compare", help="compare two runs")
    compare.set_defaults(command=_compare)
    directories += [compare.add_argument("directory"), compare.add_argument("other")]
    directories.append(add_command(commands, _say))
    lists = commands.add_parser("list", help="presets, policies and environments")
    lists.set_defaults(command=_list)
    board = commands.add_parser(
        "leaderboard", help="rank what was compared in pairs, from a CSV file", allow_abbrev=False
    )
    board.set_defaults(command=_leaderboard)
    battles = board.add_argument("battles", help="a CSV file, a line for each battle")
    battles.complete = shtab.FILE  # type: ignore[attr-defined]
    board.add_argument("--left", default="model_a", help="column of the first competitor")
    board.add_argument("--right", default="model_b", help="column of the second competitor")
    board.add_argument("--winner", default="winner", help="column of the result")
    board.add_argument("--controls", default="", help="columns of numbers, separated by commas")
    board.add_argument("--delta", type=float, default=0.05, help="failure level")
    board.add_argument("--spread", type=float, default=3.0, help="bound on the spread of scores")
    board.add_argument("--exact", type=int, default=1000, help="contrasts that are solved exactly")
    directories.append(board.add_argument("--out", help="directory of table, picture and report"))
    completion = commands.add_parser(
        "completion", help="print a script that completes this command in a shell"
    )
    completion.set_defaults(command=_completion)
    completion.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    for action in directories:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return parser


# ---- run -------------------------------------------------------------------------------------


def _run(given: argparse.Namespace) -> int:
    table = configuration_table(given)
    config = Configuration.load(table)
    suffix = "-quick" if given.quick else ""
    out = Path(given.out) if given.out else Path("results") / f"{config.name}{suffix}"
    display = Display()
    size = f"{len(config.policy)} policies, {len(config.S)} S x {config.replicates} replicates"
    display.notice(f"{config.name}: {size} x {config.horizon} rounds -> {out}")
    try:
        record = run(
            config,
            out,
            executor=given.executor,
            watch=display,
            workers=given.workers,
            address=given.address,
            save_every=given.save_every,
        )
    except KeyboardInterrupt:
        display.notice(f"stopped; what is done is kept in {out}. To go on:\n  {given.again}")
        return INTERRUPTED
    _show(record)
    return 0


def configuration_table(given: argparse.Namespace) -> dict[str, Any]:
    """The table of the preset with the flags laid over it."""
    table = read_table(find_preset(given.preset), quick=given.quick)
    usual = table.get("policies", [])
    if own := [*given.modules, *given.imports]:  # for the workers, too
        table["imports"] = [*table.get("imports", []), *own]
    for key in KEYS:
        text = getattr(given, key)
        if text is not None:
            table[key] = _flag(key, text)
    if given.arms_per_replicate:
        table["shared_arms"] = False
    for setting in given.set:
        key, equals, text = setting.partition("=")
        if not key or not equals:
            raise InputError(f"--set: expected KEY=VALUE, got {setting!r}")
        value: Any = _value(text)
        for part in reversed(key.split(".")):
            value = {part: value}
        table = lay_over(table, value)
    if given.policies is not None and isinstance(table.get("policy"), dict):
        # the preset's tables of policies that are not asked for now
        left_out = set(usual) - set(table["policies"])
        table["policy"] = {k: v for k, v in table["policy"].items() if k not in left_out}
    return table


def _flag(key: str, text: str) -> Any:
    if key == "policies":
        return [label.strip() for label in text.split(",") if label.strip()]
    if key == "S":
        return [_value(number) for number in text.split(",")]
    return text if key == "device" else _value(text)


def _value(text: str) -> Any:
    """A value as TOML writes it; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _show(record: Record) -> None:
    """The table, and where the pictures are."""
    _say(reports.table(record))
    for path in [*_pictures(record), _write_report(record)]:
        _say(path)


# ---- the other commands ----------------------------------------------------------------------


def _write_report(record: Record) -> Path:
    return reports.write_report(record, record.directory / "report.html")


def _pictures(record: Record) -> list[Path]:
    try:
        from torchglb.plotting import save_figures
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("no pictures without matplotlib: pip install matplotlib", file=sys.stderr)
        return []
    return save_figures(record, record.directory)


def _plot(given: argparse.Namespace) -> None:
    for path in _pictures(Record.open(given.directory)):
        _say(path)


def _report(given: argparse.Namespace) -> None:
    _say(_write_report(Record.open(given.directory)))


def _compare(given: argparse.Namespace) -> None:
    _say(reports.compare(Record.open(given.directory), Record.open(given.other)))


def _leaderboard(given: argparse.Namespace) -> None:
    controls = [name.strip() for name in given.controls.split(",") if name.strip()]
    columns = (given.left, given.right, given.winner, controls)
    board = leaderboard(
        given.battles, *columns, delta=given.delta, spread=given.spread, exact=given.exact
    )
    _say(reports.leaderboard_text(board))
    if given.out:
        out = Path(given.out)
        out.mkdir(parents=True, exist_ok=True)
        _say(board.save_csv(out / "leaderboard.csv"))
        _say(reports.write_leaderboard(board, out / "leaderboard.html"))


def _list(given: argparse.Namespace) -> None:
    lists = {
        "preset": presets(),
        "policy": {
            name: policies.summary_of(name)
            for name in policies.available() + policies.available(pairs=True)
        },
        "environment": {
            name: _first_line(environments.lookup(name)) for name in environments.available()
        },
    }
    for kind, described in lists.items():
        _say("\n".join(aligned([[kind, ""], *map(list, described.items())], justify="left")))
        _say("")


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _completion(given: argparse.Namespace) -> None:
    names = " ".join(presets())
    preamble = {shell: text.format(names=names) for shell, text in _COMPLETE_PRESETS.items()}
    _say(shtab.complete(_parser(), shell=given.shell, preamble=preamble))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
