"""Every public name has an example; every example in a docstring runs and prints what it says."""

import doctest
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from torchglb.environments import base as environments
from torchglb.policies import registry

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "docs" / "_build"))

import reference  # noqa: E402

PACKAGE = PROJECT / "torchglb"
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
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    monkeypatch.setattr(environments, "_ENVIRONMENTS", dict(environments._ENVIRONMENTS))
    examples = [
        test
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, name)
        if test.examples
    ]
    report: list[str] = []
    for test in examples:
        RUNNER.run(test, out=report.append, clear_globs=True)
    assert not report, "".join(report)


def public_names():
    """Every class and function of the front door and of the rooms in the reference."""
    for room in ("torchglb", *(f"torchglb.{room}" for room in reference.public_rooms())):
        module = importlib.import_module(room)
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"{room}.{name}", found


def test_every_public_name_has_an_example():
    lacking = sorted(name for name, found in public_names() if ">>> " not in (found.__doc__ or ""))
    assert not lacking, lacking


def test_no_example_is_skipped():
    skipped = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if "doctest: +SKIP" in path.read_text(encoding="utf-8")
    ]
    assert not skipped


def resolves(dotted: str) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    name, *rest = dotted.split(".")
    found = importlib.import_module(name)
    for part in rest:
        name = f"{name}.{part}"
        if not hasattr(found, part):
            # a last part need not be imported: some modules want packages that not everybody has
            known = inspect.ismodule(found) and importlib.util.find_spec(name) is not None
            if not known or name == dotted:
                return known
            importlib.import_module(name)
        found = getattr(found, part)
    return True


def test_what_the_reference_and_the_docstrings_name_is_there():
    sources = [*PACKAGE.rglob("*.py"), *(PROJECT / "docs").rglob("*.md"), PROJECT / "README.md"]
    named = {f"torchglb.{name}" for name in reference.MODULES}
    for path in sources:
        named.update(re.findall(r"\btorchglb(?:\.[A-Za-z_]\w*)+", path.read_text(encoding="utf-8")))
    assert len(named) > 100
    assert sorted(name for name in named if not resolves(name)) == []
