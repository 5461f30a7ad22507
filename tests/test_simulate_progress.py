"""What a person sees of a run."""

import io

import pytest

from torchglb.simulate import progress
from torchglb.simulate.progress import Display, duration
from torchglb.simulate.runner import Task


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def tasks():
    return [Task("d", {"horizon": 100}, label, chunk, 1.0) for label in "ab" for chunk in (0, 1)]


def test_lines_without_a_terminal(clock):
    stream = io.StringIO()
    display = Display(stream)
    some = tasks()
    display.begin(some)
    display.progress(some[0], 0)
    clock[0] += 20
    display.progress(some[0], 50)
    *_, line = stream.getvalue().splitlines()
    # 50 of 400 rounds in 20 s: 140 s for the others, at 50/20 = 2.5 rounds a second
    assert line == " 12%  20 s, about 2 min 20 s left; a 50/200 (2/s)"
    lines = len(stream.getvalue().splitlines())
    clock[0] += 1
    display.progress(some[0], 60)
    assert len(stream.getvalue().splitlines()) == lines  # not so often
    display.progress(some[0], 100)
    display.progress(some[1], 100)
    assert len(stream.getvalue().splitlines()) == lines + 1  # a policy has finished
    assert "\x1b" not in stream.getvalue()


def test_bars_on_a_terminal(clock):
    stream = Terminal()
    display = Display(stream)
    some = tasks()
    display.begin(some)
    display.progress(some[2], 40)  # continued: 40 rounds were there before
    clock[0] += 2
    display.progress(some[2], 100)
    last = stream.getvalue().split("\x1b[J")[-1].splitlines()
    assert last[0].startswith("a  ")
    assert "  0%" in last[0]
    assert "50%" in last[1]
    assert "30 rounds/s" in last[1]
    assert "about 10 s left" in last[2]  # 300 rounds at 30 a second
    display.notice("something happened")
    assert "\x1b[3A\x1b[Jsomething happened\n" in stream.getvalue()


def test_the_end_says_nothing_of_time_left(clock):
    stream = io.StringIO()
    display = Display(stream)
    display.begin(tasks()[:1])
    display.progress(tasks()[0], 100)
    assert stream.getvalue() == "100%  0 s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.7, "1 min 0 s"), (75, "1 min 15 s"), (3700, "1 h 1 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
