"""Digests of tensors that add up: those of the parts that ranks hold have the sum that the whole tensor has.

So they say whether two tensors are the same, however each of them is sharded, and on which device it is. A digest is
the sum of the tensor's 32-bit words, in the order of the whole one, each multiplied by a number that its place
determines, modulo 2 ** 64. It distinguishes other weights, not forged ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from .full_digests import bytes_of
from .shards import Shard

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
