"""What people see of a run: colours and a bar in a terminal, plain text elsewhere."""

import io
import re
import sys

import pytest

from solorl import terminal
from solorl.errors import quit_with
from solorl.run import trackers

FACTS = ["step  25,600", "return  123.4", "evaluation  500.0", "12 s left", "21,535 steps/s"]


@pytest.mark.parametrize(
    ("values", "texts"),
    [((0.85,), ["0.85"]), ((0.75, 0.5), ["0.75", "0.50"]), ((1.0, 0.0), ["1.0", "0.0"]), ((5.04,), ["5.04"]),
     ((490.04, 3.27), ["490.0", "3.3"]), ((-140.26,), ["-140.3"]), ((), []), ((float("nan"),), ["nan"])],
)  # fmt: skip
def test_scores_have_the_digits_that_tell_them_apart(values, texts):
    assert terminal.scores(*values) == texts


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def colors(monkeypatch):
    """`colors(NO_COLOR="1", ...)` sets the variables that decide about colours, and only those."""

    def call(**variables):
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    call(TERM="xterm")
    return call


def plain(text):
    """Text without its colours."""
    return re.sub(r"\033\[[0-9]+m", "", text)


@pytest.mark.parametrize(
    ("variables", "in_terminal", "in_pipe"),
    [
        ({"TERM": "xterm"}, True, False),
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_who_gets_colors(colors, variables, in_terminal, in_pipe):
    colors(**variables)
    for file, colored in ((Terminal(), in_terminal), (io.StringIO(), in_pipe)):
        assert terminal.has_colors(file) == colored
        assert ("\033[" in terminal.paint("text", "red", file)) == colored
        assert plain(terminal.paint("text", "red", file)) == "text"


@pytest.mark.parametrize("columns", [10, 40, 60, 80, 100, 200])
def test_the_line_of_progress_fits_and_fills_its_bar(colors, columns):
    for share in (0.0, 0.37, 1.0):
        line = plain(terminal.live_line(share, FACTS, columns, Terminal()))
        assert len(line) < columns
        drawn = "".join(re.findall("[━─]+", line))
        if columns >= 60:
            assert len(drawn) >= terminal.MIN_BAR and drawn.count("━") == round(share * len(drawn))
            assert f"{100 * share:3.0f} %" in line
    shown = [fact for fact in FACTS if fact in line or columns < 60]
    assert shown == FACTS[: len(shown)] and (len(shown) == 5 or columns < 100)


def test_progress_renews_itself_only_where_that_is_understood(colors, monkeypatch):
    for term, pattern in (("xterm", r"\r\033\[K\S*step 1,000  .*━+.*─+.*  20 %  return   12.5.*[^\n]$"),
                          ("dumb", r"step +1,000  20 %  return +12\.5 [^\033\r━]* left\n$")):  # fmt: skip
        colors(TERM=term, COLUMNS="100")
        monkeypatch.setattr(sys, "stdout", Terminal())
        line = terminal.Progress()
        assert line.is_due() and not line.is_due()
        line.show(1000, 5000, 12.5, None, 800.0)
        assert re.match(pattern, sys.stdout.getvalue()), sys.stdout.getvalue()


def test_warnings_and_errors_are_marked_in_a_terminal_only(colors, monkeypatch):
    for file, codes in ((Terminal(), 2), (io.StringIO(), 0)):
        monkeypatch.setattr(sys, "stderr", file)
        trackers.warn("the disk is full")
        with pytest.raises(SystemExit):
            quit_with("there is no such thing")
        assert file.getvalue().count("\033[0m") == codes
        text = plain(file.getvalue()).replace(terminal.WIPE, "")
        assert text == "warning: the disk is full\nerror: there is no such thing\n"


def test_a_run_says_which_device_it_uses(train):
    tiny = "--num-envs 2 --num-steps 16 --total-timesteps 32 --eval-episodes 1".split()
    train("ppo", *tiny)
    assert "\ndevice cpu, 1 thread\n" in train.out and "\033" not in train.out
    train("ppo", *tiny, "--threads", 2)
    assert "\ndevice cpu, 2 threads\n" in train.out
