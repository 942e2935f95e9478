"""What the forked children of `test_receiver_kills` run: a receiver under a failpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ckpt_component.publishing.delta_files  # noqa: F401  # before any fork
from ckpt_component import CheckpointError
from ckpt_component.core.storage.faults import LOG, SPEC
from ckpt_component.publishing.receiver import Receiver


def receive(source: str, folder: str, numbers: Sequence[int], failpoint: str, log: str) -> str:
    """Bring a folder to one version after the other; returns the error in words, or nothing."""
    os.environ |= {SPEC: failpoint, LOG: log}
    try:
        with Receiver(source, folder) as receiver:
            for number in numbers:
                receiver.pull(number)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""
