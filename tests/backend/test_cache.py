"""Compiled code on disk: whoever asks for it gets that of his own types, whoever else compiles."""

import importlib.util
import os
import sys

import pytest
from numba.core import config, types

SOURCE = """
from torchglb.backend import entry


@entry
def twice(x):
    return x + x
"""

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")


@pytest.fixture(params=["doubled", "doubled[1]"])
def processes(request, tmp_path, monkeypatch):
    """The same function as several processes have it."""
    path = tmp_path / f"{request.param}.py"
    path.write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(config, "CACHE_DIR", "")  # wherever other compiled code is kept

    def process():
        spec = importlib.util.spec_from_file_location("doubled", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "doubled", module)
        spec.loader.exec_module(module)
        return module.twice

    return process


def loaded(function):
    return sum(function.stats.cache_hits.values())


def test_two_processes_may_compile_at_once(processes):
    """While one writes its code, another that saw nothing yet writes that for other types."""
    first, second = processes(), processes()
    file, other = first._cache._cache_file, second._cache._cache_file
    write = file._save_data
    other._load_index = dict  # of an index it would have read nothing yet

    def late(*arguments):
        second.compile((types.float64,))
        write(*arguments)

    file._save_data = late
    first.compile((types.int64,))
    third = processes()
    assert third(1.5) == 3.0
    assert third(2) == 4
    assert loaded(third) == 2  # nobody has to compile it again


def test_a_file_that_has_changed_is_compiled_again(processes, tmp_path):
    """A number in it is no part of the bytecode; and what it calls may stand in the same file."""
    assert processes()(2) == 4
    (path,) = tmp_path.glob("*.py")
    for later, (body, value) in enumerate([("3 * x", 6), ("50 * x", 100)], start=1):
        path.write_text(SOURCE.replace("x + x", body), encoding="utf-8")
        os.utime(path, (2e9 + later, 2e9 + later))  # Python's own cache looks at whole seconds
        changed = processes()
        assert changed(2) == value
    assert loaded(changed) == 0
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_files_that_cannot_be_read_are_compiled_again(processes, tmp_path):
    processes()(2)
    (code,) = tmp_path.rglob("*.nbc")
    code.write_bytes(b"half a file")
    again = processes()
    assert again(2) == 4
    assert loaded(again) == 0
    last = processes()
    assert last(2) == 4
    assert loaded(last) == 1


def test_files_of_older_sources_go(processes, tmp_path, monkeypatch):
    processes()(2)
    (old,) = tmp_path.rglob("*.nbc")
    monkeypatch.setattr("torchglb.backend.compiled.fingerprint", lambda module: 64 * "0")
    changed = processes()
    assert changed(2) == 4
    assert loaded(changed) == 0
    (new,) = tmp_path.rglob("*.nbc")
    assert new != old
