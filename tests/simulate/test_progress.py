"""What a person sees of a run."""

import io
import re

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


def show(tasks, clock, stream, *steps):
    """A display that is told ``(seconds later, task, rounds)``, each task running."""
    display = Display(stream)
    display.begin(tasks)
    for seconds, task, rounds in steps:
        clock[0] += seconds
        display.state(task, "running")
        display.progress(task, rounds)
    return display


def test_lines_without_a_terminal(clock):
    stream, some = io.StringIO(), tasks()
    display = show(some, clock, stream, (0, some[0], 0), (20, some[0], 50))
    *_, line = stream.getvalue().splitlines()
    # 2.5 rounds a second, and 350 rounds to go on the one worker that was seen
    assert line == " 12%  20 s, about 2 min 20 s left; a 50/200 (2/s)"
    lines = len(stream.getvalue().splitlines())
    clock[0] += 1
    display.progress(some[0], 60)
    assert len(stream.getvalue().splitlines()) == lines  # not so often
    display.progress(some[0], 100)
    display.state(some[1], "running")
    display.progress(some[1], 100)
    assert len(stream.getvalue().splitlines()) == lines + 1  # a policy has finished
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_is_that_of_the_slowest_task_at_its_present_rate(clock):
    """Its rounds have become slow: 80 in the first second, one a second ever since."""
    fast, slow = tasks()[0], tasks()[2]
    steps = [(0, fast, 0), (0, slow, 0), (1, slow, 80), (0, fast, 40)]
    steps += [(1, slow, rounds) for rounds in range(81, 92)]
    display = show([fast, slow], clock, io.StringIO(), *steps, (0, fast, 90))
    # slow has 9 rounds left at 1 a second; on the whole it had done 91 in 12 seconds
    assert display.left() == pytest.approx(9.0)
    display.state(fast, "finished")
    assert display.left() == pytest.approx(9.0)


def test_tasks_that_wait_count_too(clock):
    """Two workers at 10 rounds a second each, ten tasks of 100 rounds: 50 seconds in all."""
    some = [Task("d", {"horizon": 100}, "a", chunk, 1.0) for chunk in range(10)]
    steps = [(0, some[0], 0), (0, some[1], 0), (5, some[0], 50), (0, some[1], 50)]
    assert show(some, clock, io.StringIO(), *steps).left() == pytest.approx(45.0)


def test_a_task_that_begins_again_is_measured_again(clock):
    task = tasks()[0]
    steps = [(0, task, 0), (10, task, 90), (1, task, 40), (2, task, 50)]
    assert show([task], clock, io.StringIO(), *steps).left() == pytest.approx(10.0)


def test_a_table_on_a_terminal(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream, some = Terminal(), tasks()
    display = show(some, clock, stream, (0, some[2], 40), (2, some[2], 100))
    display.state(some[2], "finished")
    display.state(some[3], "failed")
    display.notice("something happened")
    display.end()
    last = stream.getvalue().split("something happened")[-1]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last)
    heading, first, second, total = [line for line in plain.splitlines() if line.strip()][-4:]
    assert heading.split() == ["policy", "rounds", "rounds/s", "waiting", "finished", "failed"]
    assert (first.split()[0], first.split()[-2:]) == ("a", ["0%", "2"])  # two that wait
    assert (second.split()[0], second.split()[-3:]) == ("b", ["50%", "1", "1"])  # done, failed
    assert "1 failed" in total


def test_a_display_that_nobody_sees_is_no_error(clock):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    display = show(tasks(), clock, Gone(), (0, tasks()[0], 0), (20, tasks()[0], 50))
    display.notice("something happened")
    display.end()


def test_the_end_says_nothing_of_time_left(clock):
    stream = io.StringIO()
    show(tasks()[:1], clock, stream, (0, tasks()[0], 100)).end()
    assert stream.getvalue() == "100%  0 s\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.7, "1 min 0 s"), (75, "1 min 15 s"), (3700, "1 h 1 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
