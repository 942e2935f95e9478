"""A keyword that nobody knows is an error, and not ignored; parts of somebody else's are given those that they know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import AsyncCheckpointer, SyncCheckpointer, build_checkpointer
from ckpt_component.readers import Reader

STATE = {"weight": torch.ones(3)}


@pytest.mark.parametrize(
    ("preset", "name"), [("sync", "SyncCheckpointer.save"), ("async_persistent", "AsyncCheckpointer.save")]
)
def test_save_refuses_a_keyword_that_it_does_not_know(preset: str, name: str, tmp_path: Path) -> None:
    with build_checkpointer(preset) as checkpointer:
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'may_wiat'"):
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
            from concurrent.futures import Future

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
