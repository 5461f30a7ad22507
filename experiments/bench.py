"""Benchmarks: ``python experiments/bench.py NAME... [--quick] [--record PATH]``, or ``all``.

Every module of ``experiments/benchmarks`` is one benchmark, called by its name; it defines
``run(quick: bool) -> None``, which prints what it measured and whether its bar is met; one that
has no rival on the CPU takes ``device`` too, one whose numbers are quoted takes ``record``, a file
for them.
"""

import argparse
import importlib
import inspect
import pkgutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def benchmarks() -> list[str]:
    """The names of the modules in ``benchmarks``; those with an underscore are helpers."""
    found = pkgutil.iter_modules([str(HERE / "benchmarks")])
    return sorted(module.name for module in found if not module.name.startswith("_"))


def main(arguments: list[str] | None = None) -> int:
    known = benchmarks()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="all, or " + ", ".join(known))
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument(
        "--device", default="cpu", help="for launches; what the others compare with is on the CPU"
    )
    parser.add_argument(
        "--record", type=Path, help="a JSON file for what rounds measured, with date and commit"
    )
    options = parser.parse_args(arguments)
    names = known if "all" in options.names else options.names
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are: all, {', '.join(known)}")
    if options.record and "rounds" not in names:
        parser.error("--record is for rounds, whose numbers are quoted: name it too")
    settings = {"device": options.device, "record": options.record}
    for name in names:
        began, used = time.perf_counter(), time.process_time()
        print(f"== {name} {'(quick)' if options.quick else ''}".rstrip())
        run = importlib.import_module(f"benchmarks.{name}").run
        wanted = inspect.signature(run).parameters
        run(options.quick, **{k: v for k, v in settings.items() if k in wanted})
        used = time.process_time() - used  # less than the clock says if others use the machine
        print(f"== {name}: {time.perf_counter() - began:.0f} s, {used:.0f} s of CPU time\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
