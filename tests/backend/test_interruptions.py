"""Ctrl-C while something is compiled: held back until Numba is done with it."""

import os
import signal
import threading

import pytest
from numba.core import event

import torchglb.backend  # noqa: F401


@pytest.fixture(autouse=True)
def heard():
    """A shell has its background processes ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Dispatcher:
    """What Numba names as the function that it compiles."""

    def __init__(self, module):
        self.py_func = lambda: None
        self.py_func.__module__ = module


def compiling(module="torchglb.some"):
    return event.trigger_event("numba:compile", data={"dispatcher": Dispatcher(module)})


def strike():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # handlers run between two steps of the interpreter
        pass


def test_it_strikes_when_the_outermost_function_is_compiled():
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with compiling():
            with compiling():
                strike()
                done.append("part")
            done.append("whole")
        done.append("behind")
    assert done == ["part", "whole"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_one_strikes_at_once():
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), compiling():  # noqa: PT012
        strike()
        done.append("first")
        strike()
        done.append("second")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is before
    with compiling():  # as if nothing had happened
        done.append("again")
    assert done[-1] == "again"


def test_an_error_of_the_compiler_leaves_the_handler():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="typing"), compiling():
        raise ValueError("typing")
    assert signal.getsignal(signal.SIGINT) is before


def test_functions_of_others_are_not_concerned():
    with pytest.raises(KeyboardInterrupt), compiling("somebody.else"):  # noqa: PT012
        strike()
        pytest.fail("held back")


def test_other_threads_have_no_signals():
    failed = []

    def work():
        try:
            with compiling():
                pass
        except ValueError as error:  # signal only works in main thread
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
