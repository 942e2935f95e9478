"""Bring the tensors of a folder to a later version: by its deltas, and by what another folder has already."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Sequence

from ..core.outside import Future, Outside
from ..core.progress import Progress, no_progress
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, first_keys
from .delta import apply_delta, require_codec
from .delta_files import DeltaFiles
from .tensor_files import TensorFiles
from .versions import Version

#: A thread holds one tensor in memory.
_MAX_THREADS = 4


def apply_deltas(
    storage: Storage,
    deltas: Sequence[Version],
    base: TensorFiles,
    target: TensorFiles,
    behind: Collection[str] = (),
    progress: Progress = no_progress,
) -> set[str]:
    """Bring a folder from the version of another one to the last of its deltas. All tensors that change are verified.

    Args:
        storage: the storage of the versions
        deltas: the versions after that of `base`, in order
        base: has the version that the first delta is based on; may be `target` itself
        target: what is changed
        behind: names of the tensors that differ between `base` and `target` now
        progress: follows the bytes of the tensors that change

    Returns:
        The names of the tensors that differ between `base` and `target` now.

    Raises:
        CheckpointConfigError: a package is missing
        CheckpointCorruptError: a delta is damaged, or does not fit; the target has to be thrown away
        OSError: the target cannot be written
    """
    require_codec("A version that is not whole")
    changed: set[str] = set()
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with storage.outside.pool(threads, "ckpt-pull") as pool:
        for version in deltas:
            files = DeltaFiles(storage, version)
            names = files.names()
            strangers = [name for name in names if name not in target.names]
            if strangers:
                raise CheckpointCorruptError(
                    f"{version.path} changes {first_keys(strangers, 5)}, which its base does not have."
                )

            def change(name: str, data: memoryview, checksum: str, what: str, encoding: str = files.encoding) -> int:
                tensor = memoryview(bytearray(target.nbytes(name)))
                (target if name in changed else base).read(name, tensor)
                apply_delta(encoding, data, tensor, checksum, what)
                target.write(name, tensor)
                return len(tensor)

            work: deque[Future[int]] = deque()
            what = f"reading {os.path.basename(version.path)}"
            with progress(what, sum(map(target.nbytes, names))) as advance:
                for name in names:
                    if len(work) == 2 * threads:  # what waits is in memory
                        advance(_first_of(work, storage.outside))
                    work.append(pool.submit(change, name, *files.read(name), f"'{name}' of {version.path}"))
                while work:
                    advance(_first_of(work, storage.outside))
            changed.update(names)
        for name in set(behind) - changed:
            target.copy(name, base)
    return changed


def _first_of(work: deque[Future[int]], outside: Outside) -> int:
    """The result of the first of these; a tensor in memory is changed and written, by threads of this process."""
    first = work.popleft()
    outside.wait_for([first], None)
    return first.result(0)
