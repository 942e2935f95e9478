"""Portions and threads give the same bytes as one copy, for any mix of sizes, dtypes and strides."""

from __future__ import annotations

import pytest
import torch

from ckpt_component.image.host_copy import copy_on_host


def mixed() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    large = torch.randn(1500, 2000, generator=generator)  # three portions
    small = [torch.randint(0, 100, (number % 300,), generator=generator) for number in range(700)]
    return [
        large,
        large.t(),
        large[::2, ::3],
        *small,
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(40_000, generator=generator).to(torch.bfloat16),
        torch.complex(large[:200], large[200:400]).conj(),
        torch.nn.Parameter(large[:30].clone()),
        torch.rand(100_000, generator=generator) > 0.5,
    ]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_arrives(threads: int) -> None:
    sources = mixed()
    slots = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    copy_on_host(slots, sources, threads)
    for slot, source in zip(slots, sources, strict=True):
        assert torch.equal(slot, source.detach())
        assert not slot.requires_grad


def test_a_failing_portion_is_raised() -> None:
    with pytest.raises(RuntimeError):
        copy_on_host([torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(4)], threads=2)
