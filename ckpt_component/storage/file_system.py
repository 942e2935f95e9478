"""How the package gets its `FsOps`: the plain one, or for a test the one that fails where the environment says so."""

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
    spec, log = os.environ.get(SPEC, ""), os.environ.get(LOG, "")
    if not spec and not log:
        return FsOps(durable=durable, atomic_rename=atomic_rename, warns=process == "trainer")
    from ..testing.failpoint_fs import failpoint_fs  # nothing of it is loaded where no test asks for it

    return failpoint_fs(spec, log, durable=durable, atomic_rename=atomic_rename, process=process)
