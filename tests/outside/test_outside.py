"""What the real outside promises, and a simulated one keeps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from ckpt_component.core.outside import OUTSIDE, Future, Outside
from ckpt_component.core.storage.files import FileStorage

Run = Callable[[Callable[[Outside], None]], None]


def test_time_passes_while_one_sleeps(run: Run) -> None:
    def script(outside: Outside) -> None:
        began = outside.now()
        outside.sleep(0.02)
        assert outside.now() - began > 0.0199

    run(script)


def test_a_latch_wakes_who_waits_and_stays_set(run: Run) -> None:
    def script(outside: Outside) -> None:
        latch, came = outside.latch(), outside.queue()
        assert not latch.wait(0.01)
        thread = outside.start("waits", lambda: came.put(latch.wait(60)))
        latch.set()
        assert came.get() is True and latch.wait(0) and latch.is_set
        thread.join(60)
        assert not thread.is_alive()

    run(script)


def test_a_condition_gives_up_its_lock_while_it_waits(run: Run) -> None:
    def script(outside: Outside) -> None:
        changed, found = outside.condition(), list[str]()

        def change() -> None:
            with changed:
                found.append("it")
                changed.notify_all()

        with changed:
            assert not changed.wait_for(lambda: found, 0.01)
            outside.start("changes", change)
            assert changed.wait_for(lambda: found, 60) == ["it"]

    run(script)


def test_two_conditions_of_one_lock(run: Run) -> None:
    def script(outside: Outside) -> None:
        lock = outside.lock()
        one, other, said = outside.condition(lock), outside.condition(lock), list[str]()

        def answer() -> None:
            with one:
                one.wait_for(lambda: said, 60)
                said.append("answer")
                other.notify_all()

        outside.start("answers", answer)
        with lock:
            said.append("question")
            one.notify_all()
            assert other.wait_for(lambda: len(said) == 2, 60)

    run(script)


def test_one_waits_for_futures_until_a_deadline(run: Run) -> None:
    def script(outside: Outside) -> None:
        first, second = Future[int](), Future[int]()
        assert not outside.wait_for([first, second], 0.01)

        def end() -> None:
            first.set_result(1)
            second.set_exception(OSError("no"))

        outside.start("ends", end)
        assert outside.wait_for([first, second], 60) and outside.wait_for([first], None)
        assert first.result(0) == 1 and isinstance(second.exception(0), OSError)
        assert outside.wait_for([], 0)

    run(script)


def test_each_thread_has_values_of_its_own(run: Run) -> None:
    def script(outside: Outside) -> None:
        values, came = outside.thread_values(), outside.queue()
        values.name = "here"
        outside.start("other", lambda: came.put(hasattr(values, "name")))
        assert came.get() is False and values.name == "here"

    run(script)


def test_a_pool_gives_results_in_order_and_errors(run: Run) -> None:
    def script(outside: Outside) -> None:
        with outside.pool(2, "test") as pool:
            assert [*pool.map(lambda a, b: a + b, [1, 2, 3], [10, 20, 30])] == [11, 22, 33]
            failed = pool.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            failed.result(0)

    run(script)


def test_a_pool_of_one_thread_does_its_tasks_in_their_order(run: Run) -> None:
    def script(outside: Outside) -> None:
        done = list[int]()
        with outside.pool(1, "test") as pool:
            first = pool.submit(done.append, 1)
            last = [pool.submit(done.append, number) for number in range(2, 20)][-1]
            assert outside.wait_for([first, last], 60)
        assert done == [*range(1, 20)]

    run(script)


def test_a_host_has_memory_left(run: Run) -> None:
    def script(outside: Outside) -> None:
        assert outside.free_memory() > 0

    run(script)


def test_names_of_a_process_and_its_random_bytes(run: Run) -> None:
    def script(outside: Outside) -> None:
        assert outside.pid() == outside.pid() > 0
        assert len(outside.random_bytes(8)) == 8 and outside.random_bytes(8) != outside.random_bytes(8)

    run(script)


def test_the_real_one_is_itself_in_what_is_copied_or_pickled() -> None:
    storage = FileStorage()
    storage.outside = OUTSIDE
    with OUTSIDE.waits.on("nobody"):  # what has been used by others, too
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(storage, protocol)).outside is OUTSIDE
    assert copy.deepcopy(storage).outside is OUTSIDE
    with pytest.raises(pickle.PicklingError, match="OUTSIDE"):
        pickle.dumps(Outside())
