"""Our callers do what the graph relies on, and each test of the contract finds a caller that does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import CheckpointSaveError, WorkerDiedError
from ckpt_component.callers import InlineCaller, PersistentCaller, WriteCaller
from ckpt_component.core.commit.commit import publish
from ckpt_component.core.writing.request import WriteOptions, WriteRequest
from ckpt_component.core.writing.write_job import run_write_job
from ckpt_component.testing.conformance import CallerContract, registered
from ckpt_component.testing.conformance.connected_parts import children

CALLERS = registered("caller")


class TestCallers(CallerContract):
    @pytest.fixture(params=CALLERS)
    def caller(self, request: pytest.FixtureRequest) -> WriteCaller:
        made: WriteCaller = CALLERS[request.param]()
        return made


class Lossy(InlineCaller):
    """Writes no objects."""

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        return super().run(replace(request, object_blobs=()), deadline)


class OneTable(InlineCaller):
    """Writes every request by the table of the first."""

    table: Any = None

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        self.table = self.table or request.table
        return super().run(replace(request, table=self.table), deadline)


class Untyped(InlineCaller):
    """Raises what the system says."""

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        return run_write_job(request)


class FailedForEver(InlineCaller):
    """Raises its first error again and again."""

    failure: CheckpointSaveError | None = None

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        if self.failure is not None:
            raise self.failure
        try:
            return super().run(request, deadline)
        except CheckpointSaveError as error:
            self.failure = error
            raise


class Endless(PersistentCaller):
    """Heeds no deadline."""

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        fast = replace(request, options=WriteOptions())
        return super().run(fast, deadline + 60)


class Deaf(PersistentCaller):
    """Does not say that its process has died."""

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        try:
            return super().run(request, deadline)
        except WorkerDiedError as error:
            raise CheckpointSaveError("it failed") from error


class Irreplaceable(PersistentCaller):
    """Has one process and no other."""

    first: int | None = None

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        assert self.first is None or self.pid == self.first, "no other process"
        result = super().run(request, deadline)
        self.first = self.pid
        return result


class Uncounted(InlineCaller):
    """Does not count."""

    def progress(self) -> int:
        return 0


class Eager(InlineCaller):
    """Commits when its save is over."""

    request: WriteRequest | None = None

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        self.request, self.result = request, super().run(request, deadline)
        return self.result

    def settle(self) -> None:
        if self.request is not None:
            request, self.request = self.request, None
            publish(request.attempt, [self.result], request.sidecars or {}, request.manifest_fields)


class Holding(InlineCaller):
    """Keeps the memory of every save."""

    in_other_process = True

    def __init__(self) -> None:
        self.held: list[Any] = []

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        self.held.append(os.fdopen(os.dup(request.source.shared_descriptor()), "rb"))  # type: ignore[attr-defined]
        return super().run(request, deadline)

    def close(self, timeout: float = 60.0) -> None:
        while self.held:
            self.held.pop().close()


class ClosedOnce(InlineCaller):
    """Cannot be closed again."""

    closed = False

    def close(self, timeout: float = 60.0) -> None:
        assert not self.closed, "closed already"
        self.closed = True


class Patient(PersistentCaller):
    """Leaves a process that hangs to itself."""

    def close(self, timeout: float = 60.0) -> None:
        pass


BROKEN: list[tuple[type[WriteCaller], str, str]] = [
    (Lossy, "it_writes_what_it_is_given", "refers to the item"),
    (OneTable, "each_request_has_its_table_and_its_image", "is damaged"),
    (Untyped, "a_write_that_fails_fails_its_request_alone", "No such file"),
    (FailedForEver, "a_write_that_fails_fails_its_request_alone", "gone"),
    (Endless, "a_write_ends_at_its_deadline", "DID NOT RAISE"),
    (Deaf, "a_process_that_is_killed_fails_its_request_at_once", "it failed"),
    (Irreplaceable, "an_idle_process_that_is_killed_is_replaced", "no other process"),
    (Uncounted, "progress_counts_the_bytes_as_they_are_written", "progress"),
    (Eager, "settle_ends_a_save_and_commits_nothing", "given up"),
    (Holding, "freed_memory_is_not_held", "shared memory held"),
    (ClosedOnce, "close_may_be_repeated_and_leaves_nothing", "closed already"),
    (Patient, "close_kills_a_process_that_hangs", "left behind"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "promise", "text"), BROKEN)
def test_a_broken_caller_is_found(broken: type[WriteCaller], promise: str, text: str, tmp_path: Path) -> None:
    caller, before = broken(), {each.pid for each in children()}
    with pytest.raises((Exception, pytest.fail.Exception), match=text):
        getattr(CallerContract(), f"test_{promise}")(caller, tmp_path)
    for child in children():
        if child.pid not in before:
            child.kill()
    if isinstance(caller, PersistentCaller):
        PersistentCaller.close(caller, 1)


def test_each_promise_of_a_caller_can_be_broken() -> None:
    promises = {name.removeprefix("test_") for name in vars(CallerContract) if name.startswith("test_")}
    assert promises == {promise for _, promise, _ in BROKEN}
