"""File systems that wait or fail; the process that writes imports this."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence

from ckpt_component.core.storage.files import FileStorage


class GatedFs(FileStorage):
    """Says in `<gate>.pid` who wants to write, and writes when the file `gate` is there."""

    def __init__(self, gate: str) -> None:
        super().__init__(durable=False)
        self.gate = gate

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        draft = f"{self.gate}.{os.getpid()}-{threading.get_ident()}.draft"
        with open(draft, "w") as stream:
            stream.write(str(os.getpid()))
        os.replace(draft, f"{self.gate}.pid")
        deadline = time.monotonic() + 60
        while not os.path.exists(self.gate):
            if time.monotonic() > deadline:
                raise TimeoutError("the gate stayed shut")
            time.sleep(0.01)
        super().write(fd, buffers, offset)


class FullFs(FileStorage):
    """Has no room for files whose name has `part` in it."""

    def __init__(self, part: str) -> None:
        super().__init__(durable=False)
        self.part = part

    def create(self, path: str, size: int = 0) -> int:
        self._refuse(path)
        return super().create(path, size)

    def open_over(self, path: str) -> int:
        self._refuse(path)
        return super().open_over(path)

    def _refuse(self, path: str) -> None:
        if self.part in os.path.basename(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class MeetingFs(FileStorage):
    """Writes when `count` threads want to write at the same time, and fails when they never do."""

    def __init__(self, folder: str, count: int) -> None:
        super().__init__(durable=False)
        self.folder, self.count = folder, count

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with open(os.path.join(self.folder, f"here-{fd}"), "w"):
            pass
        deadline = time.monotonic() + 20
        while len(os.listdir(self.folder)) < self.count:
            if time.monotonic() > deadline:
                raise TimeoutError("the other buckets were not written at the same time")
            time.sleep(0.01)
        super().write(fd, buffers, offset)
