"""The bytes around a payload: what `torch.save` puts before and after a tensor's own bytes.

One stored tensor of a DCP file is a complete `torch.save` archive. With its checksums switched off, everything in it
but the payload depends on dtype and shape alone (TORCH 6.2), so it is taken from `torch.save` once and reused; for
shapes that are similar to a known one, from that one's archive.
"""

from __future__ import annotations

import logging
import mmap
import struct
import threading
from typing import IO, Any, cast

import torch

from ..errors import CheckpointStageError
from .patterns import Numbers, Pattern, UnknownArchiveError

logger = logging.getLogger(__name__)

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")

#: `torch.serialization.set_crc32_options` is a switch of the whole process; one template at a time may turn it.
_SWITCH = threading.Lock()


class _Recorder:
    """A file that keeps what `torch.save` writes, except for the contents of a payload of `large` bytes."""

    def __init__(self, large: int) -> None:
        self._large = max(large, 4096)
        self.parts: list[tuple[int, bytes | None]] = []

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.parts.append((view.nbytes, None if view.nbytes >= self._large else bytes(view)))
        return view.nbytes

    def flush(self) -> None:
        """Nothing is buffered."""


def element_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    """The payload of a tensor in bytes."""
    return shape.numel() * dtype.itemsize


class ItemTemplates:
    """Prefix and suffix by (dtype, shape): what `torch.save` writes, byte for byte.

    It is asked twice for each form of archive, whatever the number of shapes: once for the pattern, and once to see
    that the pattern holds. Where one does not, which this release of torch gives no reason for, it is asked for every
    shape.
    """

    def __init__(self) -> None:
        #: What `torch.save` was asked for. What a pattern gives is made anew, because of many small tensors it is more
        #: than all else that is known of them.
        self._asked: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}
        self._patterns: dict[tuple[object, ...], Pattern | None] = {}
        self._told = False

    def around(self, dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
        """The bytes before and after the payload of a contiguous tensor."""
        numbers = Numbers.of(dtype, shape)
        pattern = None if numbers is None else self._patterns.get(numbers.form)
        if numbers is not None and pattern is not None and pattern.proven:
            return pattern.fill_in(numbers)
        return self._from_torch(dtype, shape, numbers)

    def lengths(self, dtype: torch.dtype, shape: torch.Size) -> tuple[int, int]:
        """How many bytes those are."""
        numbers = Numbers.of(dtype, shape)
        pattern = None if numbers is None else self._patterns.get(numbers.form)
        if pattern is not None and pattern.proven:
            return pattern.lengths
        prefix, suffix = self._from_torch(dtype, shape, numbers)
        return len(prefix), len(suffix)

    def _from_torch(self, dtype: torch.dtype, shape: torch.Size, numbers: Numbers | None) -> tuple[bytes, bytes]:
        """What `torch.save` writes; a pattern is made of it, or held against it."""
        found = self._asked.get((dtype, shape))
        if found is not None:
            return found
        made = self._asked[dtype, shape] = _make_template(dtype, shape)
        if numbers is None:
            return made
        form = numbers.form
        pattern = self._patterns.get(form)
        if pattern is not None:
            pattern.proven = pattern.fill_in(numbers) == made
            if not pattern.proven:
                self._patterns[form] = None
                self._tell(dtype, shape, "it differs from one of its kind in more than numbers")
        elif form not in self._patterns:
            try:
                self._patterns[form] = Pattern(*made, numbers)
            except UnknownArchiveError as error:
                self._patterns[form] = None
                self._tell(dtype, shape, str(error))
        return made

    def _tell(self, dtype: torch.dtype, shape: torch.Size, why: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "planning asks torch.save for every shape, 0.2 ms each: its archive of %s of shape %s is unknown (%s)",
                dtype,
                tuple(shape),
                why,
            )


def _make_template(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    nbytes = element_bytes(dtype, shape)
    recorder = _Recorder(nbytes)
    with _SWITCH:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(_untouched(dtype, shape, nbytes), cast(IO[bytes], recorder))
        finally:
            torch.serialization.set_crc32_options(before)
    payload = _payload_offset(recorder)
    prefix, suffix, position = bytearray(), bytearray(), 0
    for size, data in recorder.parts:
        if data is None:
            if position < payload or position + size > payload + nbytes:
                raise CheckpointStageError(f"torch.save lays out a {dtype} {tuple(shape)} in an unknown way.")
        else:
            prefix += data[: max(payload - position, 0)]
            suffix += data[max(payload + nbytes - position, 0) :]
        position += size
    return bytes(prefix), bytes(suffix)


def _untouched(dtype: torch.dtype, shape: torch.Size, nbytes: int) -> torch.Tensor:
    """A tensor whose memory is never touched: with checksums off `torch.save` only hands it on."""
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    # Not torch.empty: under deterministic algorithms that fills the memory.
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(shape)


def _payload_offset(recorder: _Recorder) -> int:
    """Where the record `data/0` starts, from its local header in the archive."""
    head = bytearray()
    for _, data in recorder.parts:
        if data is None:
            break
        head += data
    position = head.find(b"PK\x03\x04")
    while position >= 0:
        fields = _LOCAL_HEADER.unpack_from(head, position)
        name_length, extra_length = fields[-2], fields[-1]
        name_at = position + _LOCAL_HEADER.size
        if head[name_at : name_at + name_length].endswith(b"/data/0"):
            return name_at + name_length + extra_length
        position = head.find(b"PK\x03\x04", position + 4)
    raise CheckpointStageError("torch.save wrote no record 'data/0'; this torch release is not supported.")
