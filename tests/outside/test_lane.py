"""`Lane`: the rules for a thread that does jobs in turn."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
from simulated.hosts import SimulatedHosts
from waiting import eventually

from ckpt_component import CheckpointError
from ckpt_component.core.lane import Lane
from ckpt_component.core.outside import OUTSIDE, CancelledError, Outside
from ckpt_component.core.waits import LongWait

Run = Callable[[Callable[[Outside], None]], None]


def test_jobs_are_done_in_turn_on_one_thread(run: Run) -> None:
    def script(outside: Outside) -> None:
        lane, done = Lane("lane", outside), list[int]()

        def job(number: int) -> int:
            done.append(number)
            return number

        futures = [lane.submit(job, number) for number in range(5)]
        assert lane.drain(outside.now() + 60) and done == [0, 1, 2, 3, 4]
        assert [future.result(0) for future in futures] == done and lane.waiting == 0
        assert not lane.is_here and lane.submit(lambda: lane.is_here) is not None
        assert lane.close(outside.now() + 60)

    run(script)


def test_an_error_is_that_of_the_future_and_the_next_job_is_done(run: Run) -> None:
    def script(outside: Outside) -> None:
        lane = Lane("lane", outside)
        failed, ended, done = lane.submit(int, "x"), lane.submit(sys.exit), lane.submit(int, "3")
        assert lane.close(outside.now() + 60) and done.result(0) == 3
        assert isinstance(failed.exception(0), ValueError) and isinstance(ended.exception(0), SystemExit)

    run(script)


def test_the_error_of_what_was_posted_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def script(outside: Outside) -> None:
        lane = Lane("ckpt-test", outside)
        with caplog.at_level(logging.ERROR):
            lane.post(int, "x")
            assert lane.close(outside.now() + 60)
        assert "a job of ckpt-test failed" in caplog.text and "invalid literal" in caplog.text

    run(script)


def test_the_newest_only(run: Run) -> None:
    def script(outside: Outside) -> None:
        lane, goes = Lane("lane", outside, newest_only=True), outside.latch()
        first = lane.submit(goes.wait, 60)
        while not first.running():
            outside.sleep(0.001)
        second, third = lane.submit(int, "2"), lane.submit(int, "3")
        goes.set()
        assert lane.close(outside.now() + 60)
        assert first.result(0) and second.cancelled() and third.result(0) == 3
        with pytest.raises(CancelledError):
            second.result(0)

    run(script)


def test_drain_and_close_have_a_deadline(run: Run) -> None:
    def script(outside: Outside) -> None:
        lane, goes = Lane("lane", outside), outside.latch()
        job = lane.submit(goes.wait, 60)
        assert not lane.drain(outside.now() + 0.01) and not lane.close(outside.now() + 0.01)
        goes.set()
        assert lane.close(outside.now() + 60) and job.result(0)

    run(script)


def test_a_long_wait_for_jobs_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    def script(outside: Outside) -> None:
        lane, told = Lane("lane", outside, jobs=lambda: "copies of step 2"), list[LongWait]()
        outside.waits.tell(told.append)
        lane.submit(outside.sleep, 4.0)
        assert lane.drain(outside.now() + 60) and not told
        lane.submit(outside.sleep, 20.0)
        assert not lane.drain(outside.now() + 1) and not told
        assert lane.drain(outside.now() + 30) and [wait.whom for wait in told] == 2 * ["copies of step 2"]
        other = Lane("ckpt-other", outside)
        other.submit(outside.sleep, 20.0)
        assert not other.close(outside.now() + 8) and told[-1].whom == "jobs of ckpt-other"

    with caplog.at_level(logging.INFO):
        process = SimulatedHosts(seed=1).process("one")
        process.start(script, process.outside)
        assert process.simulation.run(600.0)
    shown = (
        "waiting for copies of step 2, for at most 25 s more",
        "waiting for jobs of ckpt-other, for at most 3 s more",
    )
    assert caplog.messages == [*shown]


def test_the_thread_has_ended_when_a_lane_is_closed() -> None:
    lane = Lane("ckpt-closed")
    lane.submit(OUTSIDE.sleep, 0.01)
    assert lane.close(OUTSIDE.now() + 60) and lane.close(OUTSIDE.now())
    assert not any(thread.name == "ckpt-closed" for thread in threading.enumerate())


def test_jobs_that_may_be_lost_are_dropped_and_waited_for_once(run: Run) -> None:
    class Lossy(Lane):
        dropped = given_up = 0

        def _dropped(self) -> None:
            self.dropped += 1

        def _given_up(self) -> None:
            self.given_up += 1

    def script(outside: Outside) -> None:
        lane, goes, done = Lossy("lane", outside, may_lose=2), outside.latch(), list[int]()
        lane.post(goes.wait, 60)
        for number in range(4):
            lane.post(done.append, number)
        began = outside.now()
        assert lane.dropped == 2 and not lane.drain(began + 0.05)
        assert not lane.drain(began + 60) and outside.now() < began + 50 and lane.given_up == 1
        goes.set()
        while not lane.drain(outside.now() + 60):
            outside.sleep(0.01)
        assert done == [0, 1] and lane.close(outside.now() + 60) and lane.given_up == 1

    run(script)


def test_a_lane_that_is_stopped_begins_nothing_more(run: Run) -> None:
    def script(outside: Outside) -> None:
        lane, goes = Lane("lane", outside), outside.latch()
        first = lane.submit(goes.wait, 60)
        while not first.running():
            outside.sleep(0.001)
        second = lane.submit(int, "2")
        lane.stop()
        goes.set()
        assert lane.drain(outside.now() + 60) and first.result(0) and second.cancelled()
        with pytest.raises(CheckpointError, match="closed"):
            lane.submit(int)
        with pytest.raises(CheckpointError, match="closed"):
            lane.post(int)

    run(script)


def test_a_job_does_not_wait_for_itself(run: Run) -> None:
    def script(outside: Outside) -> None:
        lane = Lane("lane", outside)
        assert lane.submit(lambda: lane.drain(outside.now() + 60)) is not None
        asked = lane.submit(lambda: lane.drain(outside.now() + 60))
        waits = lane.submit(lambda: None)
        assert lane.close(outside.now() + 60) and waits.done()
        assert isinstance(asked.result(0), bool)

    run(script)


class NoThreads(Outside):
    """A system that starts no more threads."""

    def __init__(self, text: str) -> None:
        self.text = text

    def start(self, *_: object) -> None:  # type: ignore[override]
        raise RuntimeError(self.text)


def test_a_thread_that_cannot_start() -> None:
    lane = Lane("lane", NoThreads("can't start new thread"))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        lane.submit(int)
    done = list[int]()
    lane.post(done.append, 1)
    assert done == [1] and lane.waiting == 0 and lane.drain(OUTSIDE.now())
    ending = Lane("lane", NoThreads("can't create new thread at interpreter shutdown"))
    with pytest.raises(CheckpointError, match="the interpreter is ending"):
        ending.submit(int)
    ending.post(done.append, 2)
    assert done == [1, 2]


def test_what_a_job_held_is_freed_when_it_has_ended() -> None:
    class Large:
        pass

    def fail(_: object) -> None:
        raise ValueError

    lane, large = Lane("lane"), Large()
    freed = weakref.ref(large)
    futures = [lane.submit(lambda _: None, large), lane.submit(fail, large)]
    del large
    assert lane.drain(OUTSIDE.now() + 60) and futures[0].result(0) is None
    error = futures[1].exception(0)
    assert error is not None
    error.__traceback__ = None
    eventually(lambda: freed() is None)


def test_the_thread_of_a_lane_that_nobody_has_ends_after_its_jobs() -> None:
    lane, done = Lane("ckpt-collected"), list[int]()
    lane.submit(done.append, 1)
    del lane
    gc.collect()
    eventually(lambda: not any(thread.name == "ckpt-collected" for thread in threading.enumerate()))
    assert done == [1]


def test_a_fork_has_no_thread() -> None:
    lane = Lane("lane")
    lane.submit(int)
    assert lane.drain(OUTSIDE.now() + 60)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            lane.submit(int)
        except CheckpointError as error:
            code = 0 if "after the fork" in str(error) and lane.drain(0) and lane.close(0) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lane.submit(int).result(60) == 0


SCRIPT = """
import atexit, time
from ckpt_component.core.lane import Lane
from ckpt_component.core.outside import OUTSIDE
assert not OUTSIDE.is_ending()
atexit.register(lambda: print("ending", OUTSIDE.is_ending(), flush=True))
waits, not_waited_for = Lane("one", at_exit=60.0), Lane("other")
waits.submit(lambda: (time.sleep(0.3), print("done", flush=True)))
not_waited_for.submit(time.sleep, 1000)
"""


def test_the_end_of_the_interpreter_waits_for_what_is_owed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stdout == "done\nending True\n" and not done.stderr
