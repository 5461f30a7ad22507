"""Parts of compiled functions: tuples by reference, and arrays that are only borrowed."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numba.core.errors import TypingError

from torchglb.backend import StoredCalls, entry, inlined, kernel

PACKAGE = Path(__file__).parents[2] / "torchglb"


class Pair(NamedTuple):
    first: np.ndarray
    second: np.ndarray


class Whole(NamedTuple):
    number: int
    flag: bool
    share: float
    pair: Pair
    matrix: np.ndarray


@kernel
def add_up(whole, times):
    total = whole.share if whole.flag else 0.0
    for i in range(whole.pair.first.shape[0]):
        total += whole.pair.first[i] * whole.matrix[i, whole.number]
        whole.pair.second[i] += times
    return total


@kernel
def through(whole, times):
    return add_up(whole, times) + add_up(Whole(0, False, 1.0, whole.pair, whole.matrix), times)


@entry
def called(number, flag, share, first, second, matrix):
    return through(Whole(number, flag, share, Pair(first, second), matrix), 2.0)


def arguments():
    return 1, True, 0.5, np.arange(3.0), np.zeros(3), np.arange(6.0).reshape(3, 2)


def test_tuples_by_reference_are_read_and_nested_and_passed_on():
    given = arguments()
    # 0.5 + (0, 1, 2) . (1, 3, 5) + (0, 1, 2) . (0, 2, 4)
    assert called(*given) == 0.5 + 13.0 + 10.0
    np.testing.assert_array_equal(given[4], [4.0, 4.0, 4.0])


def test_borrowed_arrays_are_neither_kept_nor_freed():
    given = arguments()
    called(*given)
    before = [sys.getrefcount(each) for each in given[3:]]
    for _ in range(100):
        called(*given)
    assert [sys.getrefcount(each) for each in given[3:]] == before
    assert called(*given) == 23.5  # still there


@entry
def called_by_reference(whole, times):
    pair = whole.pair
    return through(whole, times) + pair.first[:2].sum()


def test_a_stored_tuple_is_read_by_every_call_where_it_lies():
    number, flag, share, first, second, matrix = arguments()
    calls = StoredCalls((called_by_reference, 1.0))
    other = np.ones(3), np.zeros(3), np.ones((3, 2))
    calls.with_stored(Whole(0, False, 2.0, Pair(*other[:2]), other[2]), "float64")
    (call,) = calls.with_stored(Whole(number, flag, share, Pair(first, second), matrix), "float64")
    counts = [sys.getrefcount(each) for each in (first, second, matrix)]
    for _ in range(100):
        assert call(2.0) == 23.5 + 1.0
    assert [sys.getrefcount(each) for each in (first, second, matrix)] == counts
    np.testing.assert_array_equal(second, [400.0] * 3)
    matrix[:] = 0.0  # what it reads are the arrays themselves
    assert call(2.0) == 0.5 + 1.0
    del first, second, matrix
    assert call(2.0) == 1.5  # kept alive


def test_a_kernel_that_returns_an_array_is_refused():
    @kernel
    def half(values):
        return values[::2], 1.0

    @entry
    def caller(values):
        return half(values)[1]

    with pytest.raises((TypeError, TypingError), match="a kernel returns numbers"):
        caller(np.arange(4.0))


def test_a_kernel_that_makes_an_array_is_refused():
    @kernel
    def first_of(count):
        return np.zeros(count)[0]

    @entry
    def caller(count):
        return first_of(count)

    with pytest.raises(TypingError, match="Only accept returning of array passed"):
        caller(4)


def test_inlined_views_live_in_their_caller():
    @inlined
    def tail(values):
        return values[1:]

    @kernel
    def total(values):
        rest, found = tail(values), 0.0
        for i in range(rest.shape[0]):
            found += rest[i]
        return found

    @entry
    def caller(values):
        return total(values)

    assert caller(np.arange(4.0)) == 6.0


# ---- what Numba cannot see ---------------------------------------------------------------------


def decorated():
    """Of every compiled function of the package: its decorators, what it returns, whom it calls."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                marks = {getattr(mark, "id", "") for mark in node.decorator_list}
                calls = {
                    call.func.id
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
                }
                yield (
                    node,
                    marks & {"kernel", "vectorised", "allocating", "inlined", "entry"},
                    calls,
                )


def test_kernels_call_nobody_who_returns_new_arrays():
    """Such an array would never be freed: a kernel does not count references."""
    numbers = {"None", "int", "float", "bool", "Error"}  # Error: a tuple of numbers
    everything = list(decorated())
    makers = {
        node.name
        for node, marks, _ in everything
        if "allocating" in marks or ("entry" in marks and ast.unparse(node.returns) not in numbers)
    }
    assert makers  # there are some
    found = [
        f"{node.name} calls {name}"
        for node, marks, calls in everything
        if marks & {"kernel", "vectorised"}
        for name in calls & makers
    ]
    assert not found


STRUCK = """
import signal
from torchglb.carried.kernels import workspace

class Struck(BaseException):
    pass

def strike(*_):
    raise Struck

workspace(2, 6)
signal.signal(signal.SIGALRM, strike)
struck = 0
for k in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + k % 40))
        while True:
            workspace(2, 6)
    except Struck:
        struck += 1
print(struck)
"""


def test_a_signal_while_memory_is_made_is_an_exception():
    """Ctrl-C: compiled code that made a named tuple for Python crashed the interpreter."""
    ran = subprocess.run(
        [sys.executable, "-c", STRUCK], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-500:]
    assert ran.stdout.split() == ["2000"]
