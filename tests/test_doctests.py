"""Every example of every docstring runs and says what it says it says."""

import doctest
import importlib
import pkgutil
import warnings

import pytest
import torch

import torchglb

#: modules that need an extra, or that are a program
APART = frozenset({"torchglb.warm", "torchglb.__main__"})


def examples():
    found = []
    for module in pkgutil.walk_packages(torchglb.__path__, "torchglb."):
        if module.name in APART or module.name.startswith("torchglb.testing"):
            continue
        loaded = importlib.import_module(module.name)
        finder = doctest.DocTestFinder(exclude_empty=True)
        found += [t for t in finder.find(loaded, module.name) if t.examples]
    return found


EXAMPLES = examples()


def test_there_are_examples():
    assert len(EXAMPLES) > 80


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy: an overflow may be meant
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
        said = []
        runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)
