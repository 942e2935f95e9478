"""Digests of parts of a tensor, however it is divided, add up to that of the whole; another byte makes another one."""

from __future__ import annotations

import random

import pytest
import torch

from ckpt_component.state.digests import add_up, digest_of_part
from ckpt_component.state.shards import Shard

SHAPES = [(37, 5, 3), (65_537, 1), (100, 333), (3, 4, 5, 6), (7,), (70_001,), (2, 16_384)]
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(0, 255, shape, generator=generator).to(dtype)


def parts_of(tensor: torch.Tensor, counts: list[int]) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Divide each dimension by `torch.chunk`, as DTensors are; parts with their offsets."""
    parts: list[tuple[torch.Tensor, tuple[int, ...]]] = [(tensor, ())]
    for dimension, count in enumerate(counts):
        divided = []
        for part, offsets in parts:
            start = 0
            for chunk in part.chunk(count, dimension):
                divided.append((chunk, (*offsets, start)))
                start += chunk.shape[dimension]
        parts = divided
    return parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor, chance = values(shape, dtype), random.Random(f"{shape} {dtype}")
    whole = digest_of_part(tensor, None)
    assert whole == digest_of_part(tensor.clone(), None)
    strided = torch.empty((*shape, 2), dtype=dtype)[..., 0].copy_(tensor)
    assert whole == digest_of_part(strided, None)
    for _ in range(4):
        # A part of the last dimensions is many runs of bytes, each of which is a call.
        counts = [chance.choice([1, 2, 3]) if size < 400 or number == 0 else 1 for number, size in enumerate(shape)]
        parts = parts_of(tensor, counts)
        digests = [digest_of_part(part, Shard(tensor.shape, offsets)) for part, offsets in parts]
        assert add_up(digests) == whole, counts


@pytest.mark.parametrize("shape", [(3,), (65_537, 1), (5, 40_000)])
def test_a_byte_or_an_order_makes_another_digest(shape: tuple[int, ...]) -> None:
    tensor = values(shape, torch.uint8)
    whole, seen = digest_of_part(tensor, None), set[int]()
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        for bit in (1, 128):
            other = tensor.clone()
            other.view(-1)[place] ^= bit
            seen.add(digest_of_part(other, None))
    swapped = tensor.clone()
    swapped.view(-1)[[0, 1]] = torch.tensor([tensor.view(-1)[1] ^ 1, tensor.view(-1)[0]], dtype=torch.uint8)
    seen.add(digest_of_part(swapped, None))
    assert whole not in seen and len(seen) == 2 * len({0, tensor.numel() // 2, tensor.numel() - 1}) + 1


def test_nothing_and_a_number_have_digests() -> None:
    assert digest_of_part(torch.zeros(0, 4), None) == 0
    assert digest_of_part(torch.tensor(2.0), None) != digest_of_part(torch.tensor(3.0), None)
