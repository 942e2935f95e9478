"""CRCs that are put together from those of pieces are those of the whole."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ckpt_component.readers import crc
from ckpt_component.readers.crc import CrcOfRanges
from ckpt_component.storage.checksum import PACKAGES, ChecksumMissingError, find_checksum


@pytest.mark.parametrize("together", [7, 1 << 14])
@pytest.mark.parametrize("name", ["crc32", "crc32c"])
def test_pieces_make_up_ranges(name: str, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc, "_TOGETHER", together)
    try:
        checksum = find_checksum(name)
    except ChecksumMissingError:
        pytest.skip(f"needs one of {', '.join(PACKAGES[name])}")
    assert checksum.polynomial is not None
    rng = random.Random(2)
    pieces = [rng.randbytes(rng.choice([0, 1, 5, 100, 5000, 2048, 70_001])) for _ in range(900)]
    crcs = torch.tensor([checksum.of(memoryview(piece)) for piece in pieces])
    lengths = torch.tensor(list(map(len, pieces)))
    bounds = [0, 1, 2, 60, 61, 899, 900]
    first, last = torch.tensor(bounds[:-1]), torch.tensor(bounds[1:])
    ranges = CrcOfRanges(checksum.polynomial)
    wholes = [b"".join(pieces[low:high]) for low, high in itertools.pairwise(bounds)]
    assert ranges.combined(crcs, lengths, first, last) == [checksum.of(memoryview(whole)) for whole in wholes]
    assert ranges.of_zeros(lengths).tolist() == [checksum.of(memoryview(bytes(len(piece)))) for piece in pieces]


def test_a_hash_is_no_crc() -> None:
    try:
        assert find_checksum("xxh3_64").polynomial is None
    except ChecksumMissingError:
        pytest.skip("needs xxhash")
