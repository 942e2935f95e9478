"""The bytes of tensors: views of dense ones as bytes, samples of them, and columns of integers."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from ..core.libc import memory_at
from ..errors import CheckpointError

#: Number of tensors to examine at once. The Python objects of 20,000 tensors do not fit into the CPU caches, so reading
#: one attribute of all of them, then the next, would miss the caches every time.
BATCH = 512
#: The types of almost all tensors.
ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its own memory, unlike a subclass that wraps other tensors, such as one of 8-bit floats.

    A subclass that does not override `__torch_dispatch__`, such as nn.Buffer, has its own memory.
    """
    return type(tensor) in ORDINARY or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def plain_address(tensor: torch.Tensor) -> int | None:
    """The address of a contiguous CPU tensor whose memory holds its values; None for any other tensor."""
    contiguous = has_plain_bytes(tensor) and tensor.is_cpu and tensor.is_contiguous()
    return tensor.data_ptr() if contiguous and not (tensor.is_conj() or tensor.is_neg()) else None


def plain_addresses(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """`plain_address` of up to `BATCH` tensors; faster if none is None."""
    kind = torch.Tensor
    if (
        ORDINARY.issuperset(map(type, tensors))
        and all(map(attrgetter("is_cpu"), tensors))
        and all(map(kind.is_contiguous, tensors))
        and not any(map(kind.is_conj, tensors))
        and not any(map(kind.is_neg, tensors))
    ):
        return list(map(kind.data_ptr, tensors))
    return list(map(plain_address, tensors))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy; the view keeps the tensor alive.

    Raises:
        CheckpointError: it is another tensor, whose address no system call must get
    """
    if not (has_plain_bytes(tensor) and tensor.is_cpu and tensor.is_contiguous()):
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise CheckpointError(f"A {kind} is no contiguous memory of this process; report how it was made.")
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)


def column_of(values: Iterable[int]) -> torch.Tensor:
    """Make an int64 column; faster than `torch.tensor`.

    Raises:
        OverflowError: a value does not fit into int64
        TypeError: a value is not an integer
    """
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64, device="cpu")


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
