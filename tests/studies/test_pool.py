"""The pool of jobs of `solo bench` and `solo tune`: never too many, none lost, all ended when somebody interrupts."""

import os
import signal

import pytest

from solorl.studies import pool as pools
from solorl.studies.engines import UNKNOWN, Job
from solorl.studies.pool import Ended, Pool

JOB = Job(("true",), None)


class Engine:
    """Jobs whose ends a test decides; remembers what it was told."""

    slots = 2

    def __init__(self, alive=()):
        self.codes, self.alive, self.told = {}, set(alive), []

    def submit(self, job):
        handle = f"job-{len(self.alive)}"
        self.alive.add(handle)
        return handle

    def adopt(self, handle):
        return handle in self.alive

    def poll(self, handle):
        return self.codes.get(handle)

    def cancel(self, handle, force=False):
        self.told.append((handle, force))


@pytest.fixture
def made(monkeypatch):
    """A pool without pauses, its engine, and how often it said that it was interrupted."""
    monkeypatch.setattr(pools, "TICK", 0)
    said = []
    engine = Engine(alive=["old"])
    return Pool(engine, lambda: said.append(1)), engine, said


def test_every_job_ends_once_with_what_it_is_for(made):
    pool, engine, _ = made
    one, two = pool.start(JOB, "one"), pool.start(JOB, "two")
    assert list(pool.ended()) == [] and pool.free == 0
    engine.codes[two] = 3
    assert list(pool.ended()) == [Ended("two", 3, cancelled=False, adopted=False)]
    assert list(pool.ended()) == [] and pool.running == {one: "one"} and pool.free == 1


def test_no_job_starts_without_a_free_slot(made):
    pool, engine, _ = made
    pool.start(JOB, "one")
    pool.start(JOB, "two")
    before = len(engine.alive)
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        pool.start(JOB, "three")
    assert len(engine.alive) == before and len(pool.running) == 2


def test_a_job_that_cannot_be_started_takes_no_slot(made):
    pool, engine, _ = made

    def full(job):
        raise OSError("no process")

    engine.submit = full
    with pytest.raises(OSError, match="no process"):
        pool.start(JOB, "one")
    assert pool.running == {} and pool.free == 2


def test_a_job_of_an_earlier_command_is_taken_over(made):
    pool, engine, _ = made
    assert pool.adopt(["gone"], "one") == "" and pool.running == {}
    assert pool.adopt(["gone", "old"], "one") == "old" and pool.free == 1
    engine.codes["old"] = UNKNOWN
    assert list(pool.ended()) == [Ended("one", UNKNOWN, cancelled=False, adopted=True)]


def test_a_job_is_told_to_end_once(made):
    pool, engine, _ = made
    one, two = pool.start(JOB, "one"), pool.start(JOB, "two")
    pool.cancel(one)
    pool.cancel(one)
    list(pool.ended())
    assert engine.told == [(one, False)]
    engine.codes |= {one: 0, two: 0}
    assert [ended.cancelled for ended in pool.ended()] == [True, False]


def test_a_job_that_does_not_end_is_killed_after_a_time(made, monkeypatch):
    pool, engine, _ = made
    one = pool.start(JOB, "one")
    pool.cancel(one)
    monkeypatch.setattr(pools, "GRACE", -1)
    list(pool.ended())
    assert engine.told == [(one, False), (one, True)]
    engine.codes[one] = -9
    assert len(list(pool.ended())) == 1
    engine.told.clear()
    list(pool.ended())
    assert engine.told == []  # the number of a job that has ended may be another's


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_ends_all_and_the_second_kills(made, number):
    pool, engine, said = made
    before = signal.getsignal(number)
    with pool.listening():
        one, two = pool.start(JOB, "one"), pool.start(JOB, "two")
        assert pool.exit_code == 0
        os.kill(os.getpid(), number)
        list(pool.ended())
        list(pool.ended())
        assert engine.told == [(one, False), (two, False)] and said == [1]
        os.kill(os.getpid(), number)
        engine.codes[one] = 0
        list(pool.ended())
        assert engine.told[2:] == [(two, True)] and said == [1]
    assert pool.exit_code == 128 + number and signal.getsignal(number) is before


def test_signals_go_where_they_went_before_after_an_error(made):
    pool, _, _ = made
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), pool.listening():
        assert signal.getsignal(signal.SIGINT) is not before
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before
