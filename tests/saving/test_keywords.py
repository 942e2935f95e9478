"""A keyword that nobody knows is an error, and not ignored; parts of somebody else's are given those that they know."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointTimeoutError,
    SyncCheckpointer,
    build_checkpointer,
    compose_checkpoint,
)
from ckpt_component.loading import Reader
from ckpt_component.saving.adapters import ForeignSaver

STATE = {"weight": torch.ones(3)}


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_save_refuses_a_keyword_that_it_does_not_know(preset: str, tmp_path: Path) -> None:
    with build_checkpointer(preset) as checkpointer:
        with pytest.raises(TypeError, match=r"save\(\) got an unexpected keyword argument 'may_wiat'"):
            checkpointer.save(STATE, tmp_path / "one", may_wiat=False)  # type: ignore[call-arg]
        assert os.listdir(tmp_path) == []
        checkpointer.save(STATE, tmp_path / "one")
        with pytest.raises(TypeError, match="unexpected keyword argument 'strickt'"):
            checkpointer.load(tmp_path / "one", strickt=True)


def test_parts_of_somebody_elses_get_their_keywords(tmp_path: Path) -> None:
    class Mine:
        """A stager and a writer in one."""

        def __init__(self) -> None:
            self.given: list[dict[str, Any]] = []

        def stage(self, state_dict: Any, **kwargs: Any) -> Any:
            self.given.append(kwargs)
            return state_dict

        def write(self, state_dict: Any, path: str, **kwargs: Any) -> Any:
            self.given.append(kwargs)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        def close(self) -> None:
            pass

    mine = Mine()
    with SyncCheckpointer(mine, Reader()) as blocking:
        blocking.save(STATE, tmp_path / "one", color="red")
    with AsyncCheckpointer(mine, mine, Reader()) as background:
        background.save(STATE, tmp_path / "two", color="blue")
    assert mine.given == [{"color": "red"}, {"color": "blue"}, {"color": "blue"}]


def test_a_writer_of_somebody_elses_that_hangs_fails_the_next_save_and_not_the_one_after(tmp_path: Path) -> None:
    class Hung:
        """Its first write ends when it is made to."""

        def __init__(self) -> None:
            self.futures: list[Future[None]] = []

        def write(self, state_dict: Any, path: str) -> Any:
            self.futures.append(Future())
            return self.futures[-1]

    hung = Hung()
    saver = ForeignSaver(None, hung, limit=0.1)
    saver.save(STATE, str(tmp_path / "one"))
    with pytest.raises(CheckpointTimeoutError, match=r"Hung was still writing .* after 0\.1 s"):
        saver.save(STATE, str(tmp_path / "two"))
    hung.futures[0].set_result(None)
    saver.save(STATE, str(tmp_path / "two"))
    assert len(hung.futures) == 2


@pytest.mark.parametrize("taken", ["result", "exception", "not at all"])
def test_the_error_of_a_writer_of_somebody_elses_is_raised_once(taken: str, tmp_path: Path) -> None:
    class Failing:
        """A stager and a writer in one."""

        def stage(self, state_dict: Any) -> Any:
            return state_dict

        def write(self, state_dict: Any, path: str) -> Any:
            failed: Future[None] = Future()
            failed.set_exception(OSError("the write failed"))
            return failed

        def close(self) -> None:
            pass

    def failed_save(checkpointer: AsyncCheckpointer, name: str) -> None:
        _, written = checkpointer.save(STATE, tmp_path / name)
        if taken == "exception":
            assert "the write failed" in str(written.exception(0))
        elif taken == "result":
            with pytest.raises(OSError, match="the write failed"):
                written.result(0)

    checkpointer = AsyncCheckpointer(Failing(), Failing(), Reader())
    failed_save(checkpointer, "one")
    if taken == "not at all":
        with pytest.raises(OSError, match="the write failed"):
            checkpointer.save(STATE, tmp_path / "two")
    failed_save(checkpointer, "two")
    if taken == "not at all":
        with pytest.raises(OSError, match="the write failed"):
            checkpointer.close()
    checkpointer.close()


def test_a_writer_that_derives_from_nothing_may_leave_attributes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_app_writer.py").write_text(
        """
from ckpt_component.writers import DcpWriter

class Renamed:
    format = "dcp"

    def __init__(self):
        self._writer = DcpWriter()
        self.options = self._writer.options

    def plan(self, structure, rank):
        return self._writer.plan(structure, rank)

    def index(self, rank_indexes):
        return self._writer.index(rank_indexes)
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = compose_checkpoint("sync")
    config.writer = {"_target_": "my_app_writer.Renamed"}
    with build_checkpointer(config) as checkpointer:
        checkpointer.save(STATE, tmp_path / "one")
        assert checkpointer.load(tmp_path / "one")["weight"].eq(1).all()
