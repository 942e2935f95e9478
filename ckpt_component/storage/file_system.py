"""Chooses the `FsOps` of a process: the plain one, or `FailpointFs` when a test asks for it."""

from __future__ import annotations

import os

from .fs import FsOps

#: Environment variable: which operations fail, and how; see `failpoints`.
SPEC = "CKPT_FAILPOINT"
#: Environment variable: the file in which all processes record their operations.
LOG = "CKPT_FAILPOINT_LOG"


def file_system(*, durable: bool, atomic_rename: bool = True, process: str = "trainer") -> FsOps:
    """The file system of this process.

    Args:
        durable: see `FsOps`.
        atomic_rename: see `FsOps`.
        process: name of this process, which `process=` of a failpoint matches.

    Raises:
        FailpointError: the environment variables are set but invalid.
    """
    if not (os.environ.get(SPEC) or os.environ.get(LOG)):
        return FsOps(durable=durable, atomic_rename=atomic_rename, warns=process == "trainer")
    from ..testing.failpoint_fs import FailpointFs  # only tests set these variables; production never imports it

    return FailpointFs(durable=durable, atomic_rename=atomic_rename, process=process)
