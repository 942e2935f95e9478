"""Combine the CRCs of items into the CRC of a range of a file, which one call then verifies.

Verifying the items of a range one by one takes longer than their bytes, because every call releases the GIL and the
reading threads wait for each other.

A CRC is a remainder of polynomials over bits. Appending n bytes multiplies the remainder by x^(8n) and adds that of the
new bytes, as in zlib's `crc32_combine`. This module does it for many ranges at once, column by column, in signed 32-bit
integers. The highest bit is the lowest power of x, as in zlib's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import xor

import torch

from ..core.state.int_columns import column_of

#: By checksum: its polynomial, without the highest power.
POLYNOMIALS: Mapping[str, int] = {"crc32": 0xEDB88320, "crc32c": 0x82F63B78}
_BITS = 32
_ALL = (1 << _BITS) - 1
#: Powers are products of two table entries; this is the size of the table of small powers.
_SMALL = 1 << 11
#: Numbers per operation. From 32,768 on, torch splits each of these hundreds of small operations between threads.
_BATCH = (1 << 15) - 1


def combined_crcs(
    polynomial: int,
    crcs: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> list[int]:
    """The CRC of each range, whose items are separated by nothing but zeros.

    Args:
        polynomial: The CRC's polynomial, without its highest power.
        crcs: The CRCs of all items, int64.
        begin: Where each item begins, in bytes, int64; a range is shorter than 2^31.
        end: Where it ends.
        first: The first item of each range, which begins with it.
        last: The last item of each range, which ends with it.
    """
    # A register starts with all bits set and is inverted at the end; zeros multiply it and add nothing. So an item adds
    # its inverted CRC, and removes what its own initial register has become at the end of the range.
    counts = last + 1 - first
    finish = end.index_select(0, last).repeat_interleave(counts)
    columns = (crcs ^ _ALL, finish - end, finish - begin)
    added: list[int] = []
    removed: list[int] = []
    for some, after, whole in zip(*(column.split(_BATCH) for column in columns), strict=True):
        added += _multiply(some.to(torch.int32), _powers(after, polynomial), polynomial).tolist()
        removed += _powers(whole, polynomial).tolist()
    ranges = list(zip(first.tolist(), (last + 1).tolist(), strict=True))
    # The initial register of the first item is that of the range.
    registers = column_of([reduce(xor, removed[low + 1 : high], 0) for low, high in ranges]).to(torch.int32)
    changes = _multiply(torch.full_like(registers, -1), registers, polynomial).tolist()
    return [
        (reduce(xor, added[low:high]) ^ change ^ _ALL) & _ALL
        for (low, high), change in zip(ranges, changes, strict=True)
    ]


def fits(checksums: Sequence[int]) -> bool:
    """Whether all numbers can be CRCs."""
    return min(checksums) >= 0 and max(checksums) <= _ALL


def _powers(lengths: torch.Tensor, polynomial: int) -> torch.Tensor:
    """x^(8n) for each length n."""
    highest = int(lengths.max()) // _SMALL
    small, large = _table(polynomial, 1, _SMALL), _table(polynomial, _SMALL, 1 << max(highest, 1).bit_length())
    return _multiply(small.index_select(0, lengths % _SMALL), large.index_select(0, lengths // _SMALL), polynomial)


@cache
def _table(polynomial: int, step: int, count: int) -> torch.Tensor:
    """x^(8 * step * k) for all k below `count`, a power of two. The table is doubled until it is complete."""
    power = torch.tensor([1 << _BITS - 9], dtype=torch.int32)
    for _ in range(step.bit_length() - 1):
        power = _multiply(power, power, polynomial)
    table = torch.tensor([-1 << _BITS - 1], dtype=torch.int32)  # 1
    while len(table) < count:
        table = torch.cat([table, _multiply(table, power.expand(len(table)), polynomial)])
        power = _multiply(power, power, polynomial)
    return table


def _multiply(one: torch.Tensor, other: torch.Tensor, polynomial: int) -> torch.Tensor:
    """The products of two int32 columns: Horner's method, from the highest power of `one` to the lowest."""
    overflow = polynomial - (1 << _BITS) if polynomial >> _BITS - 1 else polynomial
    product = torch.zeros_like(one)
    for bit in range(_BITS):
        carry = (product & 1) * overflow
        product >>= 1
        product &= _ALL >> 1  # the shift copied the sign
        product ^= carry
        product ^= (one >> bit & 1) * other
    return product
