"""The one place that picks the `FsOps` of a process: the plain one, or the failing one when a test asks for it."""

from __future__ import annotations

import os

from .fs import FsOps

#: Which operations fail, and how: `failpoints`.
SPEC = "CKPT_FAILPOINT"
#: The file in which all processes count their operations.
LOG = "CKPT_FAILPOINT_LOG"


def file_system(*, durable: bool, atomic_rename: bool = True, process: str = "trainer") -> FsOps:
    """The file system of this process.

    Args:
        durable: see `FsOps`.
        atomic_rename: see `FsOps`.
        process: what this process is, for the `process=` of a failpoint.

    Raises:
        FailpointError: the environment variables are set and cannot be understood.
    """
    if not (os.environ.get(SPEC) or os.environ.get(LOG)):
        return FsOps(durable=durable, atomic_rename=atomic_rename, warns=process == "trainer")
    from ..testing.failpoint_fs import FailpointFs  # only tests set these variables; production never loads it

    return FailpointFs(durable=durable, atomic_rename=atomic_rename, process=process)
