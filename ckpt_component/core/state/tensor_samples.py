"""Short digests of tensors, of all bytes of a small one and of a sample of a large one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from .dense_tensors import tensor_bytes

#: Size of the sample of one tensor, and the number of pieces it is made of.
SAMPLE_BYTES, _PIECES = 16 << 10, 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A short digest of each tensor's dtype, shape and a sample of its elements. One copy per device."""
    samples = list(map(_sample, tensors))
    places: dict[torch.device, list[int]] = {}
    for number, sample in enumerate(samples):
        places.setdefault(sample.device, []).append(number)
    sums = [0] * len(tensors)
    for numbers in places.values():
        joined = torch.cat([samples[number] for number in numbers]).cpu()
        data = tensor_bytes(joined)
        start = 0
        for number in numbers:
            end, tensor = start + samples[number].numel(), tensors[number]
            form = f"{tensor.dtype} {list(tensor.shape)}".encode()
            sums[number] = zlib.crc32(data[start:end], zlib.crc32(form))
            start = end
    return sums


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, or of evenly spaced pieces of it; independent of its strides."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.numel() * tensor.itemsize <= SAMPLE_BYTES:
        return tensor.contiguous().view(-1).view(torch.uint8)
    width = SAMPLE_BYTES // _PIECES // tensor.itemsize
    gap = (tensor.numel() - width) // (_PIECES - 1)
    starts, within = (torch.arange(count, dtype=torch.int64, device=tensor.device) for count in (_PIECES, width))
    elements = tensor.view(_INTEGERS.get(tensor.itemsize, tensor.dtype))  # `take` does not support 8-bit floats
    return torch.take(elements, starts[:, None] * gap + within).view(-1).view(torch.uint8)
