"""Choose direct or buffered I/O by a trial once per disk.

While training waits, the mode that makes bytes durable sooner. Beside training, direct I/O even if it takes somewhat
longer: a buffered write copies every byte into the page cache, and so takes a core and memory bandwidth from training.
"""

from __future__ import annotations

import contextlib
import os

from ..storage.new_names import new_token
from ..storage.storage import Storage
from .request import WriteRequest

#: A smaller image has nothing to gain, and a trial would take longer than the save.
SMALLEST = 32 << 20
TRIED_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20
#: How much longer than a buffered write a direct one may take beside training. Of a save of 0.8 GB on two cores, the
#: writer's CPU time was 0.29 s buffered and 0.04 s direct.
_PATIENCE = 1.5
#: Trials per mode; the fastest counts. One trial chose the slower mode in 5 of 60 runs, the best of two in none of 30.
_TRIALS = 2


def choose_io(request: WriteRequest, *, in_memory: bool, beside_training: bool) -> str:
    """Return `direct` or `buffered`; or `auto`, which writes buffered, if there is no trial to make.

    Args:
        request: the request to choose for
        in_memory: whether the folder's files are kept only in memory
        beside_training: whether training continues during the write
    """
    if request.options.io != "auto":
        return request.options.io
    if in_memory:
        return "buffered"
    if request.source.nbytes < SMALLEST or not request.fs.has_direct_io:
        return "auto"
    (block,) = request.source.buffers(0, BLOCK_BYTES, whole=True)
    return better_mode(*try_modes(request.fs, request.attempt.staging, block), beside_training=beside_training)


def better_mode(buffered: float, direct: float | None, *, beside_training: bool) -> str:
    """Return `direct` or `buffered`, by what `try_modes` found; `beside_training` as of `choose_io`."""
    patience = _PATIENCE if beside_training else 1
    return "direct" if direct is not None and direct < buffered * patience else "buffered"


def try_modes(fs: Storage, folder: str, block: memoryview) -> tuple[float, float | None]:
    """Write `TRIED_BYTES` a few times into `folder` in both modes, until they are durable.

    Args:
        fs: file system operations
        folder: a folder on the disk to test; the trial file is deleted
        block: `BLOCK_BYTES` bytes, page-aligned in memory

    Returns:
        The least seconds buffered and direct; None if the file system has no direct I/O.

    Raises:
        OSError: a buffered write failed, so the save would fail too
    """
    path = os.path.join(folder, f".io-trial.{new_token(fs.outside)}")  # ranks try at the same time
    buffered, direct = [], []
    for _ in range(_TRIALS):
        buffered.append(_seconds(fs, path, block, direct=False))
        try:
            direct.append(_seconds(fs, path, block, direct=True))
        except OSError:
            # No direct I/O: EINVAL from open or write, EOPNOTSUPP or others. The save is then buffered and logs that.
            return min(buffered), None
    return min(buffered), min(direct)


def _seconds(fs: Storage, path: str, block: memoryview, *, direct: bool) -> float:
    started = fs.outside.now()
    with contextlib.ExitStack() as cleaning:
        fd = fs.create(path, TRIED_BYTES)
        cleaning.callback(fs.unlink, path)
        cleaning.callback(fs.close, fd)
        target = fd
        if direct:
            target = fs.open_direct(path)
            cleaning.callback(fs.close, target)
        for position in range(0, TRIED_BYTES, BLOCK_BYTES):
            fs.write(target, [block], position)
        fs.sync(target)
        elapsed = fs.outside.now() - started
    return elapsed
