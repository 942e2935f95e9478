"""Stagers and writers of somebody else, with the interface of torch's, in our checkpointers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointBusyError,
    CheckpointExistsError,
    CheckpointListener,
    CheckpointTimeoutError,
    SyncCheckpointer,
)
from ckpt_component.loading import Reader
from ckpt_component.saving.adapters import ForeignSaver

STATE = {"weight": torch.ones(3)}


class Foreign:
    """A stager and a writer in one: what it returns ends when a test says so.

    Args:
        stages: whether `stage` returns a future, or the state
    """

    def __init__(self, *, stages: bool = False) -> None:
        self.stages = stages
        self.given: list[dict[str, Any]] = []
        self.staged: list[Future[Any]] = []
        self.written: list[Future[Any]] = []
        self.closes = 0

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        self.given.append(kwargs)
        if not self.stages:
            return state_dict
        self.staged.append(Future())
        return self.staged[-1]

    def write(self, state_dict: Any, path: str, **kwargs: Any) -> Any:
        self.given.append(kwargs)
        self.written.append(Future())
        return self.written[-1]

    def close(self) -> None:
        self.closes += 1


def test_they_get_their_keywords_and_are_closed_once(tmp_path: Path) -> None:
    foreign, closed = Foreign(), list[bool]()

    class Listener(CheckpointListener):
        def close(self) -> None:
            closed.append(True)

    with SyncCheckpointer(foreign, Reader()) as blocking:
        blocking.save(STATE, tmp_path / "one", color="red")
        foreign.written[0].set_result(None)
    assert foreign.closes == 1
    with AsyncCheckpointer(foreign, foreign, Reader()) as background:
        background.add_listener(Listener())
        background.save(STATE, tmp_path / "two", color="blue")
        foreign.written[1].set_result(None)
    assert foreign.given == [{"color": "red"}, {"color": "blue"}, {"color": "blue"}]
    assert foreign.closes == 3 and closed == [True]


@pytest.mark.parametrize("stages", [False, True])
def test_the_futures_of_a_save_end_when_theirs_do(stages: bool, tmp_path: Path) -> None:
    foreign = Foreign(stages=stages)
    checkpointer = AsyncCheckpointer(foreign, foreign, Reader())
    staged, written = checkpointer.save(STATE, tmp_path / "one")
    assert staged.done() == (not stages) and not written.done() and checkpointer.busy
    for future in foreign.staged:
        future.set_result(STATE)
    assert staged.result(0) is None and not written.done()
    with pytest.raises(CheckpointBusyError, match="two came while an earlier save was still running"):
        checkpointer.save(STATE, tmp_path / "two", may_wait=False)
    foreign.written[0].set_result("done")
    assert written.result(0) == "done" and not checkpointer.busy
    checkpointer.save(STATE, tmp_path / "two", may_wait=False)
    checkpointer.close()


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    foreign = Foreign()
    (tmp_path / "one").write_text("there")
    with SyncCheckpointer(foreign, Reader()) as checkpointer:
        assert not checkpointer.busy
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(STATE, tmp_path / "one")
    assert not foreign.written


def test_a_writer_that_hangs_fails_the_next_save_and_not_the_one_after(tmp_path: Path) -> None:
    foreign = Foreign()
    saver = ForeignSaver(None, foreign, limit=0.1)
    saver.save(STATE, str(tmp_path / "one"))
    with pytest.raises(CheckpointTimeoutError, match=r"Foreign was still writing .* after 0\.1 s"):
        saver.save(STATE, str(tmp_path / "two"))
    foreign.written[0].set_result(None)
    saver.save(STATE, str(tmp_path / "two"))
    assert len(foreign.written) == 2
    saver.close()  # and does not wait for it


def from_its_result(written: Future[Any]) -> None:
    with pytest.raises(OSError, match="the write failed"):
        written.result(0)


def from_its_exception(written: Future[Any]) -> None:
    assert "the write failed" in str(written.exception(0))


@pytest.mark.parametrize("learn", [from_its_result, from_its_exception, None])
def test_the_error_of_a_writer_is_raised_once(learn: Callable[[Future[Any]], None] | None, tmp_path: Path) -> None:
    foreign = Foreign()

    def failed_save(name: str) -> None:
        _, written = checkpointer.save(STATE, tmp_path / name)
        foreign.written[-1].set_exception(OSError("the write failed"))
        if learn is not None:
            learn(written)

    checkpointer = AsyncCheckpointer(foreign, foreign, Reader())
    failed_save("one")
    if learn is None:
        with pytest.raises(OSError, match="the write failed"):
            checkpointer.save(STATE, tmp_path / "two")
    failed_save("two")
    if learn is None:
        with pytest.raises(OSError, match="the write failed"):
            checkpointer.close()
    checkpointer.close()
