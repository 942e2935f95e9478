"""A keyword that nobody knows is an error, and not ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt_component import build_checkpointer, compose_checkpoint

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
