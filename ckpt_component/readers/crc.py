"""The CRC of a range of a file, from those of what lies in it: one call instead of one for each item.

A CRC is a remainder of polynomials over bits. To append n bytes multiplies what was before by x^(8n), and adds the
remainder of the bytes; see Mark Adler's `crc32_combine` in zlib. Here for many ranges at once, column by column.
Numbers are those of zlib: the lowest power of x is the highest of 32 bits.
"""

from __future__ import annotations

from functools import cache, reduce
from operator import xor

import torch

from ..image.columns import picked, repeated

_ONE = 1 << 31
#: Powers are the product of two from tables, one of so many small ones.
_SMALL = 1 << 11
#: So many pieces at a time. From 32,768 on torch splits each of these hundreds of little operations between threads,
#: which then wait for each other: 40,000 products took 500 ms instead of 11 where other processes had the cores.
_TOGETHER = 1 << 14


class CrcOfRanges:
    """Puts CRCs together.

    Args:
        polynomial: of the CRC, without its highest power.
    """

    def __init__(self, polynomial: int) -> None:
        self._polynomial = polynomial

    def combined(self, crcs: torch.Tensor, lengths: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> list[int]:
        """The CRC of each range, which consists of pieces one after the other.

        Args:
            crcs: of all pieces, int64.
            lengths: of all pieces in bytes, int64; a range has less than 2^31.
            first: each range's first piece.
            last: the piece behind its last.
        """
        ends = lengths.cumsum(0)
        total = repeated(picked(ends, last - 1), last - first)
        behind = total - ends
        shifted: list[int] = []
        for some, bytes_behind in zip(crcs.split(_TOGETHER), behind.split(_TOGETHER), strict=True):
            shifted += self._product(some, self._powers(bytes_behind)).tolist()
        return [reduce(xor, shifted[low:high]) for low, high in zip(first.tolist(), last.tolist(), strict=True)]

    def of_zeros(self, lengths: torch.Tensor) -> torch.Tensor:
        """The CRCs of so many zero bytes each, int64."""
        different, which = lengths.unique(return_inverse=True)
        # The register begins with all bits set, and is inverted at the end.
        ones = torch.full_like(different, 0xFFFFFFFF)
        return picked(self._product(ones, self._powers(different)) ^ ones, which)

    def _powers(self, lengths: torch.Tensor) -> torch.Tensor:
        """x^(8n)."""
        most = int(lengths.max()) // _SMALL
        small, large = _table(self._polynomial, 1, _SMALL), _table(self._polynomial, _SMALL, _rounded(most + 1))
        return self._product(picked(small, lengths % _SMALL), picked(large, lengths // _SMALL))

    def _product(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _multiply(one, other, self._polynomial)


def _rounded(count: int) -> int:
    """The next power of two, so that few tables are made."""
    return 1 << max(count - 1, 1).bit_length()


@cache
def _table(polynomial: int, step: int, count: int) -> torch.Tensor:
    """x^(8 step k) for k from 0 to before `count`, a power of two. Doubled, and doubled again."""
    power = torch.tensor([_ONE >> 8])
    for _ in range(step.bit_length() - 1):
        power = _multiply(power, power, polynomial)
    table = torch.tensor([_ONE])
    while len(table) < count:
        table = torch.cat([table, _multiply(table, power.expand(len(table)), polynomial)])
        power = _multiply(power, power, polynomial)
    return table


def _multiply(one: torch.Tensor, other: torch.Tensor, polynomial: int) -> torch.Tensor:
    product = torch.zeros_like(one)
    for bit in range(31, -1, -1):
        product ^= other * (one >> bit & 1)
        other = (other >> 1) ^ (other & 1) * polynomial
    return product
