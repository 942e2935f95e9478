"""What tests see of a manager that its public methods do not show: no other file reads its private attributes."""

from __future__ import annotations

import time

from ckpt_component import Checkpointer, CheckpointManager
from ckpt_component.background.uploads import BackgroundUploads


def checkpointer_of(manager: CheckpointManager) -> Checkpointer:
    """The checkpointer of a manager, which loads and saves path by path with the manager's settings."""
    checkpointer = manager._checkpointer
    assert checkpointer is not None
    return checkpointer


def make_due(manager: CheckpointManager) -> None:
    """As if `save.every_seconds` had passed."""
    manager._clock.last_save = -1e9


def tidied(manager: CheckpointManager) -> CheckpointManager:
    """Wait for what follows the save that is over: the deletion of old checkpoints."""
    saver = checkpointer_of(manager).saver
    assert saver.queue._lane.drain(saver.ranks.outside.now() + 60)  # type: ignore[union-attr]
    restorer = manager._restorer
    assert restorer is not None
    assert restorer._folder.purge.wait(60)
    return manager


def uploaded(manager: CheckpointManager) -> None:
    """Wait until `checkpoint.dir` has the newest checkpoint, and the manager knows it: then it deletes the local one."""
    (uploads,) = [each for each in manager._followers if isinstance(each, BackgroundUploads)]
    deadline = time.monotonic() + 60
    while uploads.lag_steps or uploads.in_use():
        assert time.monotonic() < deadline
        time.sleep(0.01)
