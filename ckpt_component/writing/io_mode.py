"""Direct or buffered: which of the two makes bytes durable sooner in a folder. Tried out once per disk."""

from __future__ import annotations

import contextlib
import os
import time

from ..storage.fs import FsOps
from ..storage.names import new_token
from .request import WriteRequest

#: An image below this has nothing to gain, and a trial would take longer than the save.
SMALLEST = 32 << 20
_TRIED_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20
#: Of each, and the best counts: of single trials 5 in 60 said the wrong one, of the best of two none in 30.
_TRIALS = 2


def choose_io(request: WriteRequest, *, in_memory: bool) -> str:
    """`direct` or `buffered`; or `auto` where there is too little to write for a trial, which is then buffered.

    Args:
        request: of which this is the mode.
        in_memory: the folder's files are kept in memory alone.
    """
    if request.options.io != "auto":
        return request.options.io
    # An object store takes whole files at their close, and has no second way to open one.
    if in_memory or not request.fs.atomic_rename:
        return "buffered"
    if request.source.nbytes < SMALLEST:
        return "auto"
    (block,) = request.source.buffers(0, BLOCK_BYTES, whole=True)
    return "direct" if direct_is_faster(request.fs, request.attempt.staging, block) else "buffered"


def direct_is_faster(fs: FsOps, folder: str, block: memoryview) -> bool:
    """Write `block` a few times into `folder` in both ways, until it is durable, and compare.

    Args:
        fs: where effects go.
        folder: on the disk in question; the trial file is deleted again.
        block: `BLOCK_BYTES` that begin at a page boundary of memory.

    Returns:
        False also where the file system has no direct I/O.

    Raises:
        OSError: buffered writing fails, so that everything else would.
    """
    path = os.path.join(folder, f".io-trial.{new_token()}")  # ranks try at the same time
    buffered, direct = [], []
    for _ in range(_TRIALS):
        buffered.append(_seconds(fs, path, block, direct=False))
        try:
            direct.append(_seconds(fs, path, block, direct=True))
        except OSError:
            # Not there, in one of many ways: EINVAL at open or at write, EOPNOTSUPP. The save itself is then buffered,
            # which its log says.
            return False
    return min(direct) < min(buffered)


def _seconds(fs: FsOps, path: str, block: memoryview, *, direct: bool) -> float:
    started = time.perf_counter()
    with contextlib.ExitStack() as cleaning:
        fd = fs.create(path, _TRIED_BYTES)
        cleaning.callback(fs.unlink, path)
        cleaning.callback(fs.close, fd)
        target = fd
        if direct:
            target = fs.open_direct(path)
            cleaning.callback(fs.close, target)
        for position in range(0, _TRIED_BYTES, BLOCK_BYTES):
            fs.write(target, [block], position)
        fs.sync(target)
        took = time.perf_counter() - started
    return took
