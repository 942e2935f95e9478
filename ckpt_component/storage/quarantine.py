"""A damaged checkpoint is put out of the way under a name that nothing looks at, and never deleted."""

from __future__ import annotations

import os

from .fs import FsOps
from .names import quarantine_path


def quarantine(fs: FsOps, path: str) -> str:
    """Rename a checkpoint's folder, durably; returns its new path.

    Nothing in this package lists, counts, loads or deletes what has such a name. It frees the step's own name, so that
    the run can save that step again.

    Raises:
        OSError: it could not be renamed; it stands where it stood.
    """
    target = quarantine_path(path)
    fs.rename_new(path, target)
    fs.sync_folder(os.path.dirname(path))
    return target
