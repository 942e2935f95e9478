"""Tensors of any dtype, shape and strides, nested in any way, come back to the bit."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointStageError, build_checkpointer

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_tensor(source: random.Random) -> torch.Tensor:
    """Random bytes as a tensor, so that NaN, -0 and all else occur; then a view with other strides."""
    dtype = source.choice(DTYPES)
    shape = [source.choice([0, 1, 1, 2, 3, 5, 17]) for _ in range(source.randrange(5))]
    count = torch.Size(shape).numel()
    width = torch.empty(0, dtype=dtype).element_size()
    data = [source.randrange(2 if dtype is torch.bool else 256) for _ in range(count * width)]
    tensor = torch.tensor(data, dtype=torch.uint8).view(dtype).view(shape)
    way = source.randrange(6)
    if way == 1 and tensor.dim() >= 2:
        return tensor.transpose(0, -1)
    if way == 2 and tensor.dim() >= 1 and tensor.shape[0] > 1:
        return tensor[1::2]
    if way == 3 and tensor.dim() >= 1 and tensor.shape[0] == 1:
        return tensor.expand(4, *tensor.shape[1:])
    if way == 4 and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if way == 5 and dtype.is_complex:
        return tensor.conj()
    return tensor


def random_state(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(3) if depth < 3 else 2
    if kind == 0 or depth == 0:
        made: dict[Any, Any] = OrderedDict() if source.random() < 0.3 else {}
        for number in range(source.randrange(1, 5)):
            made[source.choice([f"key{number}", number])] = random_state(source, depth + 1)
        return made
    if kind == 1:
        return [random_state(source, depth + 1) for _ in range(source.randrange(4))]
    if source.random() < 0.3:
        return source.choice([None, True, 7, 2.5, "text", b"bytes", (1, "two"), {3, 4}, 1 + 2j])
    return random_tensor(source)


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and as_bytes(one) == as_bytes(other)
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and list(map(repr, sorted(one, key=repr))) == list(map(repr, sorted(other, key=repr)))
            and all(same(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def wiped(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        zeros = torch.zeros(state.numel() * state.element_size(), dtype=torch.uint8)
        return zeros.view(state.dtype).view(state.shape)
    if isinstance(state, dict):
        return type(state)((key, wiped(value)) for key, value in state.items())
    return [wiped(value) for value in state] if isinstance(state, list) else None


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_what_is_saved_comes_back_to_the_bit_or_is_refused_by_key(writer: str, tmp_path: Path) -> None:
    kept = 0
    with build_checkpointer("sync", [f"checkpoint/writer={writer}", "checkpoint/stager=shared_memory"]) as ours:
        for seed in range(60):
            source = random.Random(seed)
            state = random_state(source)
            path = tmp_path / str(seed)
            try:
                ours.save(state, path)
            except CheckpointStageError as error:
                assert "'" in str(error), (seed, error)  # the key
                continue
            kept += 1
            assert same(state, ours.load(path)), (seed, state)
            target = wiped(state)
            ours.load(path, target, strict=True)
            assert same(state, target), (seed, state)
    assert kept > 40


@pytest.mark.filterwarnings("ignore:.*support is experimental")  # of torch, at the first tensor of a new dtype
@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_every_dtype_of_this_torch_comes_back_or_is_refused_when_it_is_saved(writer: str, tmp_path: Path) -> None:
    """One that only the load refused would make a committed checkpoint that nothing can read."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    saved = 0
    with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as checkpointer:
        for dtype in sorted(dtypes - quantized, key=str):
            tensor = torch.arange(32, dtype=torch.uint8)
            try:
                tensor = tensor.view(dtype)
            except RuntimeError:  # it has less than a byte
                continue
            path = tmp_path / str(dtype)
            try:
                checkpointer.save({"tensor": tensor}, path)
            except CheckpointStageError as error:
                assert "'tensor'" in str(error) and not path.exists()
                continue
            found = checkpointer.load(path)["tensor"]
            assert found.dtype is dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
            saved += 1
    assert saved > 20
