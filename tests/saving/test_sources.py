"""A restore begins with the nearest of what sources and the folder have; two sources that are folders elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip_step

from ckpt_component import CheckpointCorruptError, CheckpointExistsError, build_checkpointer, build_manager
from ckpt_component.core.commit.cleanup import RetentionPolicy
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import Scan
from ckpt_component.core.coordination import LocalCoordinator
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import LoadReport
from ckpt_component.managing.policies import ResumePolicy
from ckpt_component.managing.restore import Restorer
from ckpt_component.managing.run_context import RunContext, SnapshotSource
from ckpt_component.managing.run_folder import RunFolder


class Shelf(SnapshotSource):
    """Has the checkpoints of another folder; notes what it is asked for."""

    def __init__(self, folder: Path, run: RunContext, *, stale: bool = False) -> None:
        self.name, self.advice = folder.name, f"delete {folder.name}"
        self.asked: list[Any] = []
        self._run, self._stale = replace(run, root=str(folder)), stale

    def offer(self) -> Any:
        return self.name

    def look(self, offers: Sequence[Any]) -> bool:
        assert offers == [self.name], "each source is given what it has offered"
        return os.path.isdir(self._run.root)

    def found(self, scan: Scan) -> tuple[RunContext, Scan] | None:
        has = self._run.scan()
        return None if self._stale or not has.committed else (self._run, has)

    def told(self) -> Any:
        return [self.name]

    def join(self, told: Any) -> None:
        assert told == [self.name], "and told what it has said"

    def place(self, loaded: LoadReport) -> str:
        return f"the {self.name}"

    def drop(self, path: str) -> None:
        self.asked.append(("drop", MEGATRON.step(os.path.basename(path))))

    def drop_after(self, step: int | None) -> None:
        self.asked.append(("drop_after", step))

    def let_go(self) -> None:
        self.asked.append("let_go")


class Restart:
    """A run with a folder and two sources, `near` and `far`, in which these steps are saved; each has other values."""

    def __init__(self, root: Path, **steps: Sequence[int]) -> None:
        self.root = root
        for number, (name, saved) in enumerate(steps.items()):
            with build_manager("sync", ["checkpoint.save.at_end=false"], dir=root / name) as manager:
                for step in saved:
                    manager.save(step, {"weight": torch.full((1000,), 100.0 * number + step)})

    def begin(self, resume: str | int = "auto", **options: Any) -> float | None:
        """Restore; returns the value that is loaded, or None."""
        checkpointer = build_checkpointer("sync", alone=True)
        run = RunContext(FileStorage(), str(self.root / "run"), MEGATRON, LocalCoordinator(), ResolvedTimeouts())
        self.near, self.far = (Shelf(self.root / name, run, **options) for name in ("near", "far"))
        folder = RunFolder(run, ResumePolicy(resume, rewind=resume == 1), RetentionPolicy(), takeover=False)
        self.restorer, state = (
            Restorer(checkpointer, folder, True, (self.near, self.far)),
            {"weight": torch.zeros(1000)},
        )
        with checkpointer:
            step = self.restorer.load(state, strict=True, allow_dtype_cast=False)
        return None if step is None else float(state["weight"][0])


def test_the_newest_step_wins_and_of_equal_ones_the_nearest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    restart = Restart(tmp_path, run=[1, 2], near=[2], far=[2, 3])
    assert restart.begin() == 203.0 and "restored step 3 from the far" in caplog.text
    assert restart.restorer.is_here and not restart.restorer.is_durable
    assert restart.near.asked == ["let_go"] and restart.far.asked == []
    assert restart.begin(2) == 102.0 and restart.restorer.is_durable
    assert restart.near.asked == [] and restart.far.asked == ["let_go"]


def test_what_is_stale_is_not_used(tmp_path: Path) -> None:
    restart = Restart(tmp_path, run=[1], near=[2], far=[3])
    assert restart.begin(stale=True) == 1.0
    assert restart.restorer.is_here and restart.near.asked == restart.far.asked == ["let_go"]


def test_what_is_damaged_in_a_source_is_dropped_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    restart = Restart(tmp_path, run=[1], near=[3], far=[3])
    flip_step(tmp_path / "near", 3)
    assert restart.begin() == 203.0
    assert "step 3 in near cannot be used, trying step 3" in caplog.text
    assert restart.near.asked == [("drop", 3), "let_go"] and restart.far.asked == []
    assert not [path for path in (tmp_path / "near").iterdir() if "quarantine" in path.name]


def test_if_nothing_else_is_left_the_error_says_how_to_get_past_it(tmp_path: Path) -> None:
    restart = Restart(tmp_path, run=[], near=[], far=[3])
    flip_step(tmp_path / "far", 3)
    with pytest.raises(CheckpointCorruptError, match="Nothing else is left; delete far"):
        restart.begin()


def test_to_go_back_drops_what_follows_in_all_of_them(tmp_path: Path) -> None:
    restart = Restart(tmp_path, run=[1, 2], near=[3], far=[])
    assert restart.begin(1) == 1.0
    assert restart.near.asked == restart.far.asked == [("drop_after", 1), "let_go"]


def test_what_sources_alone_have_is_not_in_the_way_of_a_save(tmp_path: Path) -> None:
    restart = Restart(tmp_path, run=[1], near=[3], far=[])
    with pytest.raises(CheckpointExistsError, match="holds checkpoints of step 1"):
        restart.begin("never")
    assert Restart(tmp_path / "other", run=[], near=[3], far=[]).begin("never") is None
