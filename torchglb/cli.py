"""The command line: ``torchglb run figure1``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchglb import environments, policies
from torchglb import report as reports
from torchglb.errors import InputError, RunError, SolverError
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, or 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = _parser().parse_args(words)
    given.again = shlex.join(["torchglb", *words])
    try:
        return int(given.command(given) or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InputError as error:
        print(f"torchglb: {error}", file=sys.stderr)
        return WRONG
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, RunError, SolverError) as error:
        print(f"torchglb: {error}", file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchglb",
        description="Generalized linear bandits: experiments, figures, reports.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run an experiment, or continue it", allow_abbrev=False)
    run.set_defaults(command=_run)
    run.add_argument("preset", help="a preset (see `torchglb list`) or a TOML file")
    run.add_argument("--quick", action="store_true", help="a small version of it")
    for key, text in KEYS.items():
        run.add_argument(f"--{key}", help=text)
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the preset"
    )
    run.add_argument("--executor", default="processes", help="serial, processes (default) or ray")
    run.add_argument("--workers", type=int, help="worker processes; the number of cores by default")
    run.add_argument("--address", help="of the Ray cluster")
    run.add_argument(
        "--save-every", type=float, default=20.0, metavar="SECONDS", help="checkpoints"
    )
    run.add_argument("--out", help="directory of the results; results/NAME by default")

    plot = commands.add_parser("plot", help="draw the figures of a run")
    plot.set_defaults(command=_plot)
    plot.add_argument("directory")
    report = commands.add_parser("report", help="write the report of a run, one HTML file")
    report.set_defaults(command=_report)
    report.add_argument("directory")
    compare = commands.add_parser("compare", help="compare two runs")
    compare.set_defaults(command=_compare)
    compare.add_argument("directory")
    compare.add_argument("other")
    lists = commands.add_parser("list", help="presets, policies and environments")
    lists.set_defaults(command=_list)
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
    for key in KEYS:
        text = getattr(given, key)
        if text is not None:
            table[key] = _flag(key, text)
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
    print(reports.table(record))
    for path in [*_pictures(record), _write_report(record)]:
        print(path)


# ---- the other commands ----------------------------------------------------------------------


def _write_report(record: Record) -> Path:
    return reports.write_report(record, record.directory / "report.html")


def _pictures(record: Record) -> list[Path]:
    try:
        from torchglb.plotting import save_figures
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("no pictures without matplotlib: pip install 'torchglb[plot]'", file=sys.stderr)
        return []
    return save_figures(record, record.directory)


def _plot(given: argparse.Namespace) -> None:
    for path in _pictures(Record.open(given.directory)):
        print(path)


def _report(given: argparse.Namespace) -> None:
    print(_write_report(Record.open(given.directory)))


def _compare(given: argparse.Namespace) -> None:
    print(reports.compare(Record.open(given.directory), Record.open(given.other)))


def _list(given: argparse.Namespace) -> None:
    print("presets:")
    for name, title in presets().items():
        print(f"  {name:<14} {title}")
    print("policies:\n  " + " ".join(policies.available()))
    print("environments:\n  " + " ".join(environments.available()))


if __name__ == "__main__":
    sys.exit(main())
