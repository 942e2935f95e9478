"""Digests of values: of whole tensors, of the parts that a rank has, and of Python objects."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from ..core.libc import views_of
from ..core.outside import OUTSIDE
from ..core.storage.checksum import ChecksumMissingError, find_checksum
from .flatten import FlatState
from .shards import Shard
from .tensors import BATCH, SAMPLE_BYTES, plain_addresses, tensor_bytes, tensor_digests

#: The algorithms in order of preference; the last one is always there.
HASHES = ("xxh3_64", "crc32")
#: A digest of bytes.
Hash = Callable[[Any], int]

#: Maximum size of a piece of a tensor, and of the pieces that are copied to host memory together.
_PIECE_BYTES, _COPIED_BYTES = 16 << 20, 64 << 20
#: A tensor of more bytes is hashed by another thread.
_SMALL_BYTES = 256 << 10


def installed_hashes() -> list[str]:
    """Those of `HASHES` that can be computed here."""
    found = []
    for name in HASHES:
        try:
            found.append(find_checksum(name).name)
        except ChecksumMissingError:
            continue
    return found


class FullDigests:
    """Computes a digest of all bytes of some tensors of a structure.

    Args:
        flat: a state of the structure
        numbers: of the tensors
        hash_of: the algorithm, the same on all ranks
    """

    def __init__(self, flat: FlatState, numbers: Sequence[int], hash_of: Hash) -> None:
        self._numbers = numbers
        self._hash = hash_of
        #: Of small tensors in host memory: place among `numbers`, number, and what views so many bytes at an address.
        self._small: list[tuple[int, int, Callable[[int], Any]]] = []
        #: Places of large tensors in host memory, and of tensors that must be copied.
        self._large: list[int] = []
        self._copied: list[int] = []
        self._empty: list[int] = []
        tensors = [flat.tensors[number] for number in numbers]
        addresses = chain.from_iterable(plain_addresses(tensors[i : i + BATCH]) for i in range(0, len(tensors), BATCH))
        for place, (tensor, address) in enumerate(zip(tensors, addresses, strict=True)):
            if tensor.nbytes == 0:
                self._empty.append(place)
            elif address is None:
                self._copied.append(place)
            elif tensor.nbytes > _SMALL_BYTES:
                self._large.append(place)
            else:
                self._small.append((place, numbers[place], views_of(tensor.nbytes)))

    def of(self, flat: FlatState) -> array[int]:
        """The digests of the tensors in a state of the structure. Training must not write into them during the call."""
        digests, hash_of = array("Q", bytes(8 * len(self._numbers))), self._hash
        #: The digests of the pieces of large and of copied tensors, in order.
        parts: dict[int, list[int]] = defaultdict(list)
        large = self._pieces(flat, self._large)
        with OUTSIDE.pool(torch.get_num_threads(), "ckpt-hash") as threads:
            hashes = threads.map(lambda each: hash_of(tensor_bytes(each[1])), large)
            pointers = flat.pointers
            for place, number, view_at in self._small:  # `tensor_bytes` would take longer than the hash
                digests[place] = hash_of(view_at(pointers[number]))
            for place, digest in _hash_copies(self._pieces(flat, self._copied), hash_of):
                parts[place].append(digest)
            for (place, _), digest in zip(large, hashes, strict=True):
                parts[place].append(digest)
        for place, each in parts.items():
            digests[place] = each[0] if len(each) == 1 else hash_of(array("Q", each).tobytes())
        for place in self._empty:
            digests[place] = hash_of(b"")
        return digests

    def _pieces(self, flat: FlatState, places: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        tensors = [(place, flat.tensors[self._numbers[place]].detach()) for place in places]
        return [(place, piece) for place, tensor in tensors for piece in _pieces_of(tensor)]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its elements; a copy unless it is contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Divide a large tensor along its first dimensions."""
    if tensor.nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        yield tensor
        return
    rows = _PIECE_BYTES // (tensor.nbytes // tensor.shape[0])
    if rows:
        yield from tensor.split(rows)
    else:
        for row in tensor.unbind():
            yield from _pieces_of(row)


def _hash_copies(pieces: Sequence[tuple[int, torch.Tensor]], hash_of: Hash) -> Iterator[tuple[int, int]]:
    """Hash pieces that are not contiguous, or on another device: many small ones by one copy."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, piece in pieces:
        by_device[piece.device].append((number, piece))
    for on_device in by_device.values():
        start = 0
        while start < len(on_device):
            end, size = start, 0
            while end < len(on_device) and (end == start or size + on_device[end][1].nbytes <= _COPIED_BYTES):
                size += on_device[end][1].nbytes
                end += 1
            numbers, together = zip(*on_device[start:end], strict=True)
            memory = tensor_bytes(torch.cat(list(map(bytes_of, together))).cpu())
            offset = 0
            for number, piece in zip(numbers, together, strict=True):
                yield number, hash_of(memory[offset : offset + piece.nbytes])
                offset += piece.nbytes
            start = end


_WORD = 4
#: Words whose factors differ in one of two numbers; each is that of the row times that of the column.
_COLUMNS = 16384
_ROW = _COLUMNS * _WORD
#: Rows that are multiplied at once; on the host as many as torch takes without further threads, which others use.
_HOST_ROWS, _DEVICE_ROWS = 2, 1024
_MODULUS = 1 << 64


def digest_of_part(tensor: torch.Tensor, shard: Shard | None) -> int:
    """The digest of a tensor, or what a part of it adds to that.

    Args:
        tensor: the tensor, or the part that this rank holds
        shard: where the part is; None: it is the whole
    """
    if tensor.numel() == 0:
        return 0
    whole = tensor.shape if shard is None else shard.shape
    offsets = (0,) * len(whole) if shard is None else shard.offsets
    values = bytes_of(tensor)
    # The dimensions from `split` on are whole, so what the part has of these is one run of bytes, and each row too.
    split = max((number for number, size in enumerate(tensor.shape) if size != whole[number]), default=0)
    inner = math.prod(whole[split + 1 :]) * tensor.itemsize
    length = inner * (tensor.shape[split] if tensor.dim() else 1)
    total = 0
    for number, first in enumerate(_first_elements(tensor.shape[:split], offsets, whole, split)):
        total += _digest_of_run(values[number * length : (number + 1) * length], first * inner)
    return total % _MODULUS


def add_up(digests: Sequence[int]) -> int:
    """The digest of a tensor, from those of its parts."""
    return sum(digests) % _MODULUS


def _first_elements(rows: Sequence[int], offsets: Sequence[int], whole: Sequence[int], split: int) -> list[int]:
    """For each row of a part, in order, where it begins in the whole tensor, in units of what is below `split`."""
    places = [0]
    for number, count in enumerate(rows):
        places = [(place + offsets[number] + index) * whole[number + 1] for place in places for index in range(count)]
    start = offsets[split] if whole else 0
    return [place + start for place in places]


def _digest_of_run(values: torch.Tensor, start: int) -> int:
    """What a run of bytes, which begins at a place in the tensor, adds to its digest."""
    total, position, factors = 0, 0, _factors(values.device)
    most = _ROW * (_HOST_ROWS if values.is_cpu else _DEVICE_ROWS)
    while position < len(values):
        row, before = divmod(start + position, _ROW)
        whole_rows = 0 if before else min(len(values) - position, most) // _ROW
        count = whole_rows * _ROW or min(_ROW - before, len(values) - position)
        chunk = values[position : position + count]
        if not whole_rows:
            chunk = torch.nn.functional.pad(chunk, (before, _ROW - before - count))
        elif chunk.storage_offset() % _WORD:
            chunk = chunk.clone()
        words = chunk.view(torch.int32).view(-1, _COLUMNS).to(torch.int64)
        sums = words @ factors if values.is_cpu else (words * factors).sum(1)  # CUDA has no such product of integers
        total += sum(_mixed(row + number) * each for number, each in enumerate(sums.tolist()))
        position += count
    return total


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """The factors of the columns."""
    with torch.inference_mode(False):
        return torch.tensor([_mixed(~number) for number in range(_COLUMNS)], dtype=torch.int64, device=device)


def _mixed(number: int) -> int:
    """An odd number that looks random, as a signed one of 64 bits (the finalizer of splitmix64)."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % _MODULUS
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % _MODULUS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % _MODULUS
    mixed = (mixed ^ (mixed >> 31)) | 1
    return mixed - _MODULUS if mixed >> 63 else mixed


#: Maximum number of elements per object. Of a longer list the first ones are compared, of a longer dict the number.
MOST = 4096
#: Types whose `repr` has the whole value.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def object_digest(value: Any, budget: int | None = MOST) -> int:
    """A digest of at most `budget` elements of a Python object; None: of all, and of all their bytes."""
    return int.from_bytes(_digest(value, budget), "little")


def _digest(value: Any, budget: int | None) -> bytes:
    kind = type(value)
    size = len(value) if kind in (dict, OrderedDict, set, list, tuple, str, bytes) else 0
    parts: list[bytes | memoryview]
    plain = _all_plain(value) if budget is None else None
    if plain is not None:
        parts = [plain]
    elif kind in (dict, OrderedDict, set):
        # Split the budget evenly, so that the order of the elements does not matter.
        elements = value if kind is set else value.items()
        each = None if budget is None else budget // max(size, 1)
        parts = [*sorted(_digest(element, each) for element in elements)] if each != 0 else []
    elif kind in (list, tuple):
        each = None if budget is None else budget // max(min(size, budget), 1)
        parts = [_digest(element, each) for element in value[:budget]]
    elif kind in (str, bytes):
        data = value if kind is bytes else value.encode(errors="surrogatepass")
        parts = [data] if budget is None else [data[:SAMPLE_BYTES], data[-SAMPLE_BYTES:]]
    elif isinstance(value, torch.Tensor):
        parts = _of_tensor(value) if budget is None else [repr(tensor_digests([value])).encode()]
    elif hasattr(value, "tobytes"):  # of numpy
        step = 1 if budget is None else max(-(-value.nbytes // SAMPLE_BYTES), 1)
        parts = [f"{value.dtype} {value.shape}".encode(), value.flat[::step].tobytes()]
    else:
        parts = [repr(value).encode()]
    return hashlib.blake2b(b"|".join([f"{kind.__name__} {size}".encode(), *parts]), digest_size=8).digest()


def _all_plain(value: Any) -> bytes | None:
    """The `repr` of a container of plain values, which is much faster than a digest of each; None: it is another."""
    kind = type(value)
    if kind in (list, tuple) and _PLAIN.issuperset(map(type, value)):
        return repr(value).encode(errors="surrogatepass")
    if (
        kind in (dict, OrderedDict)
        and {str}.issuperset(map(type, value))
        and _PLAIN.issuperset(map(type, value.values()))
    ):
        return repr(sorted(value.items(), key=itemgetter(0))).encode(errors="surrogatepass")
    return None


def _of_tensor(tensor: torch.Tensor) -> list[bytes | memoryview]:
    memory = bytes_of(tensor).cpu()
    form = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return [form, tensor_bytes(memory)]
