"""What the forked children of `test_receiver_kills` run: a receiver under a failpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from faults.mounts import mount_tmpfs
from published import leftovers, version_at

import ckpt_component.publishing.delta  # noqa: F401  # before any fork
from ckpt_component import CheckpointError
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG
from ckpt_component.publishing.receiver import Receiver


def receive(source: str, folder: str, numbers: Sequence[int], failpoint: str, log: str) -> str:
    """Bring a folder to one version after the other; returns the error in words, or nothing."""
    os.environ |= {FAILPOINT: failpoint, FAILPOINT_LOG: log}
    try:
        with Receiver(source, folder) as receiver:
            for number in numbers:
                receiver.pull(number)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def receive_on_a_full_disk(source: str, disk: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Follow on a disk that has room for a version once, and then for two; returns what was met."""
    folder, said, log = f"{disk}/model", list[str](), logging.getLogger("ckpt_component")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    mount_tmpfs(disk, f"size={sizes[0]}")
    with Receiver(source, folder) as receiver:
        receiver.pull(1)
        try:
            [*receiver.follow(0.01, timeout=0.5)]
        except TimeoutError as error:
            end = str(error)
        before = version_at(folder)
        left = leftovers(folder)
        mount_tmpfs(disk, f"size={sizes[1]}", remount=True)
        receiver.pull(2)
    return {"said": said, "end": end, "before": before, "left": left, "after": version_at(folder)}
