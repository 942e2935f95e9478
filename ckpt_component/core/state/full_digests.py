"""Digests of all bytes of tensors, computed where the tensors are, on several threads.

A contiguous tensor in host memory is not copied. Others are copied to host memory a few megabytes at a time. A digest
does not depend on strides and device; a large tensor is divided by its shape, which all replicas have in common.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from ..libc import views_of
from ..outside import OUTSIDE
from ..storage.checksum import ChecksumMissingError, find_checksum
from .dense_tensors import BATCH, plain_addresses, tensor_bytes
from .flatten import FlatState

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
