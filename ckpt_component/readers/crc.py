"""The CRC of a range of a file, combined from those of what lies in it: one call instead of one for each item.

A CRC is a remainder of polynomials over bits. To append n bytes multiplies what was before by x^(8n), and adds the
remainder of the bytes, as in zlib's `crc32_combine`. Here for many ranges at once, column by column, in 32 bits with a
sign. The lowest power of x is the highest bit, as in zlib's numbers.
"""

from __future__ import annotations

from functools import cache, reduce
from operator import xor

import torch

from ..memory.int_columns import column_of, picked, repeated

_BITS = 32
_ALL = (1 << _BITS) - 1
#: Powers are the product of two from tables, one of so many small ones.
_SMALL = 1 << 11
#: So many pieces at a time. From 32,768 on torch splits each of these hundreds of little operations between threads,
#: which then wait for each other.
_TOGETHER = (1 << 15) - 1


def combined_crcs(
    polynomial: int,
    crcs: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> list[int]:
    """The CRC of each range, in which pieces follow each other with nothing but zeros between them.

    Args:
        polynomial: of the CRC, without its highest power.
        crcs: of all pieces, int64.
        begin: where each piece begins, in bytes, int64; a range has less than 2^31.
        end: where it ends.
        first: each range's first piece. The range begins where that does.
        last: the piece behind its last, with whose end the range ends.
    """
    # A register begins with all bits set and is inverted at the end; zeros multiply it, and add nothing. So a piece
    # adds its CRC without that, and takes back what the register that it began with has become at the range's end.
    finish = repeated(picked(end, last - 1), last - first)
    columns = (crcs ^ _ALL, finish - end, finish - begin)
    added: list[int] = []
    taken: list[int] = []
    for some, behind, whole in zip(*(column.split(_TOGETHER) for column in columns), strict=True):
        added += _multiply(some.to(torch.int32), _powers(behind, polynomial), polynomial).tolist()
        taken += _powers(whole, polynomial).tolist()
    ranges = list(zip(first.tolist(), last.tolist(), strict=True))
    # The range's own register began with the first piece's.
    registers = column_of([reduce(xor, taken[low + 1 : high], 0) for low, high in ranges]).to(torch.int32)
    changes = _multiply(torch.full_like(registers, -1), registers, polynomial).tolist()
    return [
        (reduce(xor, added[low:high]) ^ change ^ _ALL) & _ALL
        for (low, high), change in zip(ranges, changes, strict=True)
    ]


def _powers(lengths: torch.Tensor, polynomial: int) -> torch.Tensor:
    """x^(8n)."""
    highest = int(lengths.max()) // _SMALL
    small, large = _table(polynomial, 1, _SMALL), _table(polynomial, _SMALL, 1 << max(highest, 1).bit_length())
    return _multiply(picked(small, lengths % _SMALL), picked(large, lengths // _SMALL), polynomial)


@cache
def _table(polynomial: int, step: int, count: int) -> torch.Tensor:
    """x^(8 step k) for k from 0 to before `count`, a power of two. Doubled, and doubled again."""
    power = torch.tensor([1 << _BITS - 9], dtype=torch.int32)
    for _ in range(step.bit_length() - 1):
        power = _multiply(power, power, polynomial)
    table = torch.tensor([-1 << _BITS - 1], dtype=torch.int32)  # 1
    while len(table) < count:
        table = torch.cat([table, _multiply(table, power.expand(len(table)), polynomial)])
        power = _multiply(power, power, polynomial)
    return table


def _multiply(one: torch.Tensor, other: torch.Tensor, polynomial: int) -> torch.Tensor:
    """The product of columns, int32: from the highest power of `one` to the lowest, each time by x."""
    overflow = polynomial - (1 << _BITS) if polynomial >> _BITS - 1 else polynomial
    product = torch.zeros_like(one)
    for bit in range(_BITS):
        carry = (product & 1) * overflow
        product >>= 1
        product &= _ALL >> 1  # the sign moved with it
        product ^= carry
        product ^= (one >> bit & 1) * other
    return product
