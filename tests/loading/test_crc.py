"""CRCs that are put together from those of pieces are those of the whole."""

from __future__ import annotations

import random

import pytest
import torch

from ckpt_component.core.storage.checksum import ChecksumMissingError, find_checksum
from ckpt_component.formats.ranges import POLYNOMIALS, combined_crcs


@pytest.mark.parametrize("count", [900, 40_000], ids=["one batch", "several"])
@pytest.mark.parametrize("name", ["crc32", "crc32c"])
def test_pieces_make_up_ranges(name: str, count: int) -> None:
    try:
        checksum = find_checksum(name)
    except ChecksumMissingError as error:
        pytest.skip(str(error))
    rng = random.Random(2)
    lengths, between = [0, 1, 5, 100, 5000, 2048, 70_001], [0, 0, 1, 63, 2048, 30_000]
    if count > 900:
        lengths, between = lengths[:3], between[:3]
    pieces = [rng.randbytes(rng.choice(lengths)) for _ in range(count)]
    gaps = [rng.choice(between) for _ in pieces]
    crcs = torch.tensor([checksum.of(memoryview(piece)) for piece in pieces])
    end = torch.tensor([len(piece) + gap for piece, gap in zip(pieces, gaps, strict=True)]).cumsum(0)
    begin = end - torch.tensor(list(map(len, pieces)))
    bounds = [0, 1, 2, 60, 61, count - 1, count]
    first, last = torch.tensor(bounds[:-1]), torch.tensor(bounds[1:])
    data = b"".join(bytes(gap) + piece for piece, gap in zip(pieces, gaps, strict=True))
    wholes = [data[start:stop] for start, stop in zip(begin[first].tolist(), end[last - 1].tolist(), strict=True)]
    combined = combined_crcs(POLYNOMIALS[name], crcs, begin, end, first, last - 1)
    assert combined == [checksum.of(memoryview(whole)) for whole in wholes]
