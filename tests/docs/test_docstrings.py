"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "torchglb"
RUNNER = doctest.DocTestRunner(
    optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS, verbose=False
)


def modules_with_examples() -> list[str]:
    """The dotted names of the modules that have a ``>>>`` in their text."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found.append(".".join(parts).removesuffix(".__init__"))
    return found


MODULES = modules_with_examples()


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    examples = [
        test
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, name)
        if test.examples
    ]
    report: list[str] = []
    for test in examples:
        RUNNER.run(test, out=report.append, clear_globs=True)
    assert not report, "".join(report)
