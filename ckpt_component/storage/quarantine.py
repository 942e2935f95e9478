"""A damaged checkpoint is put out of the way, where nothing looks at it, and never deleted."""

from __future__ import annotations

import os

from ..errors import CheckpointError
from .cleanup import attempts_in, is_quarantined
from .fs import FsOps
from .liveness import LifeSigns
from .manifest import MAX_BYTES, data_folder, read_manifest
from .names import MANIFEST, QUARANTINED, quarantine_path


def quarantine(fs: FsOps, path: str) -> str:
    """Put a checkpoint out of the way, durably; returns where its data is now.

    Its folder is renamed. Where that cannot be done in one step, or would take along what others are writing into it,
    the data stays, its manifest becomes the file `quarantined.json` beside it, and `manifest.json` is taken away.
    Nothing in this package lists, counts, loads or deletes it from then on. The step's own name is free, so that the
    run can save that step again.

    Raises:
        OSError: it could not be done; it stands where it stood.
    """
    if not fs.atomic_rename or attempts_in(fs, path):
        return _mark(fs, path)
    target = quarantine_path(path)
    fs.rename_new(path, target)
    fs.sync_folder(os.path.dirname(path))
    return target


def _mark(fs: FsOps, folder: str) -> str:
    """First the mark, by which a sweep leaves the data alone; then the name goes."""
    manifest = os.path.join(folder, MANIFEST)
    try:
        content = fs.read(manifest, MAX_BYTES)
    except FileNotFoundError:
        content = b"{}\n"
    marked = _data_of(fs, folder)
    for path in marked:
        fs.write_over(os.path.join(path, QUARANTINED), content)
    if os.path.lexists(manifest):
        fs.unlink(manifest)
        fs.sync_folder(folder)
    return marked[0]


def _data_of(fs: FsOps, folder: str) -> list[str]:
    """Where the data is; all that it may be where the manifest cannot say so."""
    try:
        found = read_manifest(fs, folder)
        if found is not None:
            return [data_folder(folder, found)]
    except CheckpointError:
        pass  # that it is damaged is why we are here
    attempts = [os.path.join(folder, name) for name in attempts_in(fs, folder)]
    signs = LifeSigns(fs, os.path.dirname(folder))
    dead = [
        path for path in attempts if not signs.is_alive(path, os.path.basename(path)) and not is_quarantined(fs, path)
    ]
    return dead or [folder]
