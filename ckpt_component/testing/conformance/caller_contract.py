"""What every caller must do, as tests: derive from `CallerContract`, and pytest runs them with your caller.

    class TestMine(CallerContract):
        @pytest.fixture
        def caller(self):
            return MyCaller()

Tests of a process are skipped for a caller with `in_other_process = False`.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ...callers.write_callers import WriteCaller
from ...core.commit import commit
from ...core.writing.request import WriteOptions, WriteRequest
from ...errors import CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from ...formats.dcp import DcpWriter
from ...stagers.base import Snapshot
from ...stagers.shared_memory import SharedMemoryStager
from .connected_parts import (
    PATIENCE_S,
    ConnectedParts,
    children,
    differences,
    example_state,
    large_state,
    load,
    memfds,
    nothing_left,
    within,
)

#: A write of `large_state` takes a minute.
_SLOW = WriteOptions(block_bytes=1 << 12, io="buffered", max_bytes_per_second=130_000)


class CallerContract:
    """Tests of a caller. A subclass defines the fixture `caller`."""

    @pytest.fixture
    def caller(self) -> WriteCaller:
        """A new caller with its settings, which the test closes."""
        raise NotImplementedError("define a fixture `caller` that returns your caller")

    def test_it_writes_what_it_is_given(self, caller: WriteCaller, tmp_path: Path) -> None:
        with self._parts(caller, tmp_path) as parts:
            caller.prepare(PATIENCE_S)
            for number in (1, 2, 3):
                snapshot = parts.take(example_state(number))
                request = parts.request(snapshot)
                result = self._run(caller, request)
                sizes = {entry["name"]: entry["size"] for entry in result["files"]}
                assert sizes == {each.name: each.stat().st_size for each in Path(request.attempt.staging).iterdir()}
                assert (result["rank"], result["bytes"]) == (0, sum(sizes.values()))
                path = parts.publish(request, result)
                caller.settle()
                assert not differences(load(path), example_state(number))
                snapshot.release()

    def test_each_request_has_its_table_and_its_image(self, caller: WriteCaller, tmp_path: Path) -> None:
        with self._parts(caller, tmp_path, arenas=2) as parts:
            states = [example_state(1), {"weight": large_state(2)["weight0"]}, example_state(3), large_state(4)]
            one, two = parts.take(states[0]), parts.take(states[1])
            self._check(parts, {1: two, 0: one}, states)
            one, two = parts.take(states[2]), parts.take(states[3])
            self._check(parts, {2: one, 3: two}, states)

    def test_a_write_that_fails_fails_its_request_alone(self, caller: WriteCaller, tmp_path: Path) -> None:
        with self._parts(caller, tmp_path) as parts:
            for number in (1, 2):
                snapshot = parts.take(example_state(number))
                request = parts.request(snapshot)
                gone = replace(request, attempt=replace(request.attempt, staging=str(tmp_path / "gone")))
                with pytest.raises(CheckpointSaveError) as caught:
                    self._run(caller, gone)
                assert caught.value.errno == errno.ENOENT
                caller.settle()
                assert not differences(parts.stored(snapshot), example_state(number))
                snapshot.release()

    def test_a_write_ends_at_its_deadline(self, caller: WriteCaller, tmp_path: Path) -> None:
        self._needs_a_process(caller)
        with self._parts(caller, tmp_path) as parts:
            snapshot = parts.take(large_state(1))
            request = parts.request(snapshot, _SLOW)
            with pytest.raises(CheckpointTimeoutError, match=r"timeouts\.write"):
                within(PATIENCE_S, lambda: caller.run(request, time.monotonic() + 0.3))
            caller.settle()
            assert not differences(parts.stored(snapshot), large_state(1))
            snapshot.release()

    def test_a_process_that_is_killed_fails_its_request_at_once(self, caller: WriteCaller, tmp_path: Path) -> None:
        self._needs_a_process(caller)
        with self._parts(caller, tmp_path) as parts, ThreadPoolExecutor(1) as save_thread:
            snapshot = parts.take(large_state(1))
            request, before = parts.request(snapshot, _SLOW), {each.pid for each in children()}
            running = save_thread.submit(caller.run, request, time.monotonic() + 3 * PATIENCE_S)
            self._wait_until(lambda: os.listdir(request.attempt.staging))
            self._signal(signal.SIGKILL, before)
            with pytest.raises(WorkerDiedError):
                running.result(PATIENCE_S)
            caller.settle()
            assert not differences(parts.stored(snapshot), large_state(1))
            snapshot.release()

    def test_an_idle_process_that_is_killed_is_replaced(self, caller: WriteCaller, tmp_path: Path) -> None:
        self._needs_a_process(caller)
        with self._parts(caller, tmp_path) as parts:
            before = {each.pid for each in children()}
            caller.prepare(PATIENCE_S)
            for number in (1, 2):
                snapshot = parts.take(example_state(number))
                assert not differences(parts.stored(snapshot), example_state(number))
                snapshot.release()
                self._signal(signal.SIGKILL, before)
                self._wait_until(lambda: {each.pid for each in children()} <= before)
                caller.progress()

    def test_progress_counts_the_bytes_as_they_are_written(self, caller: WriteCaller, tmp_path: Path) -> None:
        with self._parts(caller, tmp_path) as parts, ThreadPoolExecutor(1) as save_thread:
            caller.prepare(PATIENCE_S)
            snapshot = parts.take(large_state(1))
            request, before = parts.request(snapshot), caller.progress()
            running, seen = save_thread.submit(self._run, caller, request), [before]
            while not running.done():
                seen.append(caller.progress())
                time.sleep(0.001)
            written = running.result(PATIENCE_S)["bytes"]
            assert seen == sorted(seen)
            assert caller.progress() - before >= written
            commit.abandon(request.attempt)
            caller.settle()
            snapshot.release()

    def test_settle_ends_a_save_and_commits_nothing(self, caller: WriteCaller, tmp_path: Path) -> None:
        with self._parts(caller, tmp_path) as parts:
            caller.settle()
            snapshot = parts.take(example_state(1))
            request = parts.request(snapshot)
            self._run(caller, request)
            caller.settle()
            caller.settle()
            within(PATIENCE_S, caller.close)
            assert not os.path.exists(request.attempt.target), "committed a save that was given up"
            commit.abandon(request.attempt)
            assert os.listdir(tmp_path) == []
            snapshot.release()

    def test_freed_memory_is_not_held(self, caller: WriteCaller, tmp_path: Path) -> None:
        with self._parts(caller, tmp_path) as parts:
            held = []
            for number in range(1, 7):
                # Each state needs a larger arena than the one before.
                state = {"weight": example_state(number)["model"]["weight"].repeat(number, 1)}
                snapshot = parts.take(state)
                assert not differences(parts.stored(snapshot), state)
                held.append(sum(len(memfds(pid)) for pid in (os.getpid(), *(each.pid for each in children()))))
                snapshot.release()
                del snapshot
            assert held[-1] <= held[1], f"shared memory held after each save: {held}"

    def test_close_may_be_repeated_and_leaves_nothing(self, caller: WriteCaller, tmp_path: Path) -> None:
        with nothing_left():
            caller.prepare(PATIENCE_S)
            within(PATIENCE_S, caller.close)
            within(PATIENCE_S, caller.close)

    def test_close_kills_a_process_that_hangs(self, caller: WriteCaller, tmp_path: Path) -> None:
        self._needs_a_process(caller)
        with self._parts(caller, tmp_path) as parts, nothing_left(1):
            before = {each.pid for each in children()}
            snapshot = parts.take(example_state(1))
            request = parts.request(snapshot)
            self._run(caller, request)
            self._signal(signal.SIGSTOP, before)
            within(PATIENCE_S, lambda: caller.close(0.1))
            commit.abandon(request.attempt)
            snapshot.release()
            del snapshot, request
            parts.stager.close()

    @staticmethod
    def _parts(caller: WriteCaller, folder: Path, arenas: int = 1) -> ConnectedParts:
        return ConnectedParts(folder, SharedMemoryStager(arenas), DcpWriter(), caller)

    @staticmethod
    def _run(caller: WriteCaller, request: WriteRequest) -> Mapping[str, Any]:
        return caller.run(request, time.monotonic() + PATIENCE_S)

    @staticmethod
    def _check(parts: ConnectedParts, taken: Mapping[int, Snapshot], states: list[Any]) -> None:
        for number, snapshot in taken.items():
            assert not differences(parts.stored(snapshot), states[number])
            snapshot.release()

    @staticmethod
    def _signal(number: signal.Signals, before: set[int]) -> None:
        """Send a signal to the processes that were started since."""
        for child in children():
            if child.pid not in before:
                child.send_signal(number)

    @staticmethod
    def _wait_until(holds: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)

    @staticmethod
    def _needs_a_process(caller: WriteCaller) -> None:
        if not caller.in_other_process:
            pytest.skip("this caller writes in the trainer")
