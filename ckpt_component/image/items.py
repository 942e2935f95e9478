"""The bytes around a payload: what makes a tensor's own bytes an archive that `torch.load` reads.

One stored tensor of a DCP file is a complete archive. Everything in it but the payload depends on dtype and
shape alone. The pickle is the one of `torch.save`, asked once and reused; for shapes that are similar to a known one,
the known one's with other numbers. Of the records beside it these archives have what loading needs, without padding
between them: 650 bytes around a payload instead of 1,560, which is 3 % of a state of 20,000 tensors of 1 to 64 KB.
"""

from __future__ import annotations

import logging
import mmap
import pickletools
import struct
import sys
import threading
from typing import IO, Any, cast

import torch

from ..errors import CheckpointStageError
from ..state.structure import element_bytes
from .patterns import MOST_BYTES, Numbers, Pattern, UnknownPickleError
from .torch_archive import central_header, end_of_directory, local_header

logger = logging.getLogger(__name__)

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_SIZES = struct.Struct("<2L")
_OFFSET = struct.Struct("<L")
#: Where the sizes stand in a local header and in an entry of the directory, and the directory's place at the end.
_IN_LOCAL, _IN_CENTRAL, _FROM_END = 18, 20, 6

#: `torch.serialization.set_crc32_options` is a switch of the whole process; one pickle at a time may turn it.
_SWITCH = threading.Lock()


class _Recorder:
    """A file that keeps what `torch.save` writes up to a payload of `large` bytes."""

    def __init__(self, large: int) -> None:
        self._large = max(large, 4096)
        self._over = False
        self.head = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._over = self._over or view.nbytes >= self._large
        if not self._over:
            self.head += view
        return view.nbytes

    def flush(self) -> None:
        """Nothing is buffered."""


class ItemTemplates:
    """Prefix and suffix by (dtype, shape).

    `torch.save` is asked twice for each form of pickle, whatever the number of shapes: once for the pattern, and once
    to see that the pattern holds. Where one does not, which this release of torch gives no reason for, it is asked for
    every shape.
    """

    def __init__(self) -> None:
        #: What `torch.save` was asked for. What a pattern gives is made anew, because of many small tensors it is more
        #: than all else that is known of them.
        self._asked: dict[tuple[torch.dtype, torch.Size], bytes] = {}
        self._patterns: dict[tuple[object, ...], Pattern | None] = {}
        self._frames: dict[int, _Frame] = {}
        self._told = False

    def around(self, dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
        """The bytes before and after the payload of a contiguous tensor."""
        numbers = Numbers.of(dtype, shape)
        pattern = None if numbers is None else self._patterns.get(numbers.form)
        if numbers is not None and pattern is not None and pattern.proven:
            return self._frame(pattern.length).around(pattern.fill_in(numbers), numbers.nbytes)
        pickled = self._from_torch(dtype, shape, numbers)
        return self._frame(len(pickled)).around(pickled, element_bytes(dtype, shape))

    def lengths(self, dtype: torch.dtype, shape: torch.Size) -> tuple[int, int]:
        """How many bytes those are."""
        numbers = Numbers.of(dtype, shape)
        pattern = None if numbers is None else self._patterns.get(numbers.form)
        if pattern is not None and pattern.proven:
            return self._frame(pattern.length).lengths
        prefix, suffix = self.around(dtype, shape)
        return len(prefix), len(suffix)

    def _frame(self, pickled: int) -> _Frame:
        found = self._frames.get(pickled)
        if found is None:
            found = self._frames[pickled] = _Frame(pickled)
        return found

    def _from_torch(self, dtype: torch.dtype, shape: torch.Size, numbers: Numbers | None) -> bytes:
        """What `torch.save` pickles; a pattern is made of it, or held against it."""
        found = self._asked.get((dtype, shape))
        if found is not None:
            return found
        made = self._asked[dtype, shape] = _pickled_by_torch(dtype, shape)
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
                self._patterns[form] = Pattern(made, numbers)
            except UnknownPickleError as error:
                self._patterns[form] = None
                self._tell(dtype, shape, str(error))
        return made

    def _tell(self, dtype: torch.dtype, shape: torch.Size, why: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "planning asks torch.save for every shape, 0.2 ms each: its pickle of %s of shape %s is unknown (%s)",
                dtype,
                tuple(shape),
                why,
            )


class _Frame:
    """What is around pickles of one length and their payloads.

    Args:
        pickled: bytes of the pickle.

    Attributes:
        lengths: of prefix and suffix, of payloads up to `MOST_BYTES`.
    """

    def __init__(self, pickled: int) -> None:
        self._pickled = pickled
        start, between, end = _records(pickled, 0)
        self.lengths = (len(start) + pickled + len(between), len(end))
        self._start = start
        sizes = between.rindex(b"PK\x03\x04") + _IN_LOCAL
        self._between = between[:sizes], between[sizes + _SIZES.size :]
        sizes, place = end.rindex(b"PK\x01\x02") + _IN_CENTRAL, len(end) - _FROM_END
        self._end = end[:sizes], end[sizes + _SIZES.size : place], end[place + _OFFSET.size :]

    def around(self, pickled: bytes, nbytes: int) -> tuple[bytes, bytes]:
        """Prefix and suffix of a payload."""
        if nbytes >= MOST_BYTES:
            start, between, end = _records(self._pickled, nbytes)
            return b"".join((start, pickled, between)), end
        sizes, (one, two), (three, four, five) = _SIZES.pack(nbytes, nbytes), self._between, self._end
        directory = _OFFSET.pack(self.lengths[0] + nbytes)
        return b"".join((self._start, pickled, one, sizes, two)), b"".join((three, sizes, four, directory, five))


def _records(pickled: int, nbytes: int) -> tuple[bytes, bytes, bytes]:
    """What is before the pickle, between it and the payload, and after the payload."""
    start = local_header("data.pkl", pickled, 0, aligned=False)
    directory = [central_header("data.pkl", pickled, 0)]
    position = len(start) + pickled
    between = b""
    for name, data in (("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        directory.append(central_header(name, len(data), position + len(between)))
        between += local_header(name, len(data), position + len(between), aligned=False) + data
    directory.append(central_header("data/0", nbytes, position + len(between)))
    between += local_header("data/0", nbytes, position + len(between))
    entries = b"".join(directory)
    end = end_of_directory(len(directory), len(entries), position + len(between) + nbytes)
    return start, between, entries + end


def _pickled_by_torch(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """The pickle in the archive of a contiguous tensor."""
    nbytes = element_bytes(dtype, shape)
    recorder = _Recorder(nbytes)
    with _SWITCH:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(_untouched(dtype, shape, nbytes), cast(IO[bytes], recorder))
        finally:
            torch.serialization.set_crc32_options(before)
    head = bytes(recorder.head)
    _, *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(head)
    name_end = _LOCAL_HEADER.size + name_length
    if not head[_LOCAL_HEADER.size : name_end].endswith(b"/data.pkl"):
        raise CheckpointStageError("torch.save does not begin with the pickle; this torch release is not supported.")
    start = name_end + extra_length
    try:
        *_, (_, _, stop) = pickletools.genops(head[start:])
    except ValueError as error:
        raise CheckpointStageError(
            f"torch.save pickles a {dtype} {tuple(shape)} in an unknown way: {error}."
        ) from error
    return head[start : start + cast(int, stop) + 1]


def _untouched(dtype: torch.dtype, shape: torch.Size, nbytes: int) -> torch.Tensor:
    """A tensor whose memory is never touched: with checksums off `torch.save` only hands it on."""
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    # Not torch.empty: under deterministic algorithms that fills the memory.
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(shape)
