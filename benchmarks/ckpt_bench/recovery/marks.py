"""When things happened, by a clock that all processes of the host share, in one file for each process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def now() -> float:
    """Seconds of the host's monotonic clock."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Marks:
    """Writes the marks of one process. What is written stays when the process is killed.

    Args:
        folder: where the files of all processes are
        rank: of this process
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._descriptor = os.open(
            os.path.join(folder, f"{rank}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def add(self, name: str, value: Any = None, at: float | None = None) -> None:
        """Write a mark.

        Args:
            name: what happened
            value: of JSON's types
            at: when; None: now
        """
        line = json.dumps([name, now() if at is None else at, value]) + "\n"
        os.write(self._descriptor, line.encode())


def read_marks(folder: str) -> dict[int, dict[str, tuple[float, Any]]]:
    """The last mark of each name, with its time and value, by rank. A line that is being written is not read."""
    found = {}
    for path in Path(folder).glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        found[int(path.stem)] = {name: (at, value) for name, at, value in map(json.loads, lines)}
    return found
