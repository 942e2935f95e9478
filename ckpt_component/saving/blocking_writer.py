"""A save that training waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from typing import Any

from .pipeline import Saver
from .report import SaveReport


class BlockingWriter:
    """What a `SyncCheckpointer` writes with: save, and wait for the commit.

    Args:
        saver: closed with the writer.
    """

    def __init__(self, saver: Saver) -> None:
        self.saver = saver

    def write(self, state_dict: Mapping[Any, Any], path: str) -> SaveReport:
        """Return when the checkpoint is committed, or raise what went wrong; with `on_error: warn` it is reported."""
        started = time.perf_counter()
        _, future = self.saver.save(state_dict, path)
        wait_futures([future])  # its deadlines are those of the phases of a save
        report = future.report() if future.tolerated else future.result()
        return replace(report, stall_s=time.perf_counter() - started)

    def close(self) -> None:
        """Free memory and processes."""
        self.saver.close()
