"""The parts of publishing a delta that no program can leave out, one after the other, on one core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import zstandard

from ckpt_component.core.storage.checksum import fastest

from ..measure.target_files import files_of
from .changing_weights import ChangingWeights, bytes_of
from .spent import Spent, SpentClock

BLOCK_BYTES = 2 << 20
#: Level 1, with a table that fits into the nearest cache, as the bytes that changed are as short as they are rare.
PARAMETERS = zstandard.ZstdCompressionParameters(compression_level=1, window_log=17, hash_log=10)
_IMPORTS = "import numpy, xxhash, zstandard"
_SECONDS = 60.0


class Parts:
    """Holds a copy of the weights in a file, as a publisher does. A context manager.

    Args:
        weights: what is published
        path: of the file
    """

    def __init__(self, weights: ChangingWeights, path: str) -> None:
        self._weights, self._path = weights, path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._spent: dict[str, Spent] = {}
        position = 0
        for data in map(bytes_of, weights.tensors):
            position += os.pwrite(self._fd, data, position)
        os.fsync(self._fd)

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def measure(self, checkpoint: str) -> dict[str, Spent]:
        """Do all of them once for the weights of now, and bring the copy to them.

        Args:
            checkpoint: its files are read

        Returns:
            What was spent on `start`, a process and its imports; `read`, the checkpoint with its checksum; `compare`,
            reading the copy, and which bits differ; `compress`; and `write`, the copy.
        """
        self._spent = {}
        with self._part("start"):
            subprocess.run([sys.executable, "-c", _IMPORTS], check=True, timeout=_SECONDS)
        with self._part("read"):
            _read(checkpoint, self._weights.nbytes)
        position = 0
        for data in map(bytes_of, self._weights.tensors):
            self._compare(data, position)
            position += len(data)
        return self._spent

    def _compare(self, data: memoryview, position: int) -> None:
        """A tensor: compare, compress and write it block by block."""
        stream = zstandard.ZstdCompressor(compression_params=PARAMETERS).compressobj(size=len(data))
        old = memoryview(bytearray(BLOCK_BYTES))
        for start in range(0, len(data), BLOCK_BYTES):
            new = data[start : start + BLOCK_BYTES]
            block = old[: len(new)]
            with self._part("compare"):
                os.preadv(self._fd, [block], position + start)
                bits = numpy.frombuffer(block, numpy.uint8)
                numpy.bitwise_xor(bits, numpy.frombuffer(new, numpy.uint8), out=bits)
            with self._part("compress"):
                stream.compress(block)
            with self._part("write"):
                os.pwrite(self._fd, new, position + start)
        with self._part("compress"):
            stream.flush()

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        clock, before = SpentClock(), self._spent.get(name, Spent(0.0, 0.0))
        yield
        self._spent[name] = Spent(*map(sum, zip(before, clock.spent(), strict=True)))


def _read(checkpoint: str, nbytes: int) -> None:
    """Read so many bytes of the files of a checkpoint, with their checksum."""
    checksum, block, left = fastest().of, memoryview(bytearray(BLOCK_BYTES)), nbytes
    for path in files_of(checkpoint):
        with open(path, "rb", buffering=0) as file:
            while left > 0 and (count := file.readinto(block)):
                checksum(block[:count])
                left -= count
