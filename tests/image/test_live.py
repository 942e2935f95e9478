"""The image of live tensors: the bytes of every range are those of an arena that was filled, whatever the blocks."""

from __future__ import annotations

import ctypes
import logging
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ckpt_component.core import libc
from ckpt_component.core.coordination import LocalCoordinator
from ckpt_component.core.image.live_source import LiveSource
from ckpt_component.core.pages import PAGE
from ckpt_component.formats.dcp import DcpWriter
from ckpt_component.formats.safetensors import SafetensorsWriter
from ckpt_component.formats.torch_save import TorchSaveWriter
from ckpt_component.formats.writer import Writer
from ckpt_component.stagers.base import Stager
from ckpt_component.stagers.shared_memory import LiveStager, SharedMemoryStager

STATE: Mapping[str, Any] = {
    "many": {str(number): torch.full((number,), float(number)) for number in range(300)},
    "large": torch.arange(300_000, dtype=torch.float64),
    "turned": torch.arange(5_000, dtype=torch.int32).reshape(50, 100).t(),
    "wide": torch.arange(400_000, dtype=torch.float32).reshape(400, 1000).t(),
    "conjugated": torch.complex(torch.rand(100), torch.rand(100)).conj(),
    "none": torch.empty(0),
    "scalar": torch.tensor(3, dtype=torch.uint8),
}


def snapshot_of(stager: Stager, writer: Writer, state: Mapping[str, Any]) -> Any:
    stager.connect(writer, ranks=LocalCoordinator(), shared=False, timeout=10)
    return stager.take(stager.inspect(state))


@pytest.fixture(params=[DcpWriter, TorchSaveWriter, SafetensorsWriter])
def both(request: pytest.FixtureRequest) -> Any:
    """The image of live tensors, and the same image in memory."""
    live = snapshot_of(LiveStager(), request.param(), STATE)
    filled = snapshot_of(SharedMemoryStager(), request.param(), STATE)
    assert isinstance(live.source, LiveSource) and live.source.nbytes == filled.layout.arena_bytes
    yield live.source, bytes(b"".join(filled.source.buffers(0, filled.source.nbytes)))
    filled.release()


@pytest.mark.parametrize("whole", [False, True])
def test_any_range_is_what_an_arena_has(both: Any, whole: bool) -> None:
    source, image = both
    chance = random.Random(1)
    for _ in range(200):
        start = chance.randrange(0, len(image)) // PAGE * PAGE
        end = min(start + chance.choice([1, 63, PAGE, 70_000, 1 << 20, len(image)]), len(image))
        pieces = source.buffers(start, end, whole=whole)
        assert b"".join(pieces) == image[start:end]
        if whole:
            (piece,) = pieces
            assert ctypes.addressof(ctypes.c_char.from_buffer(piece)) % PAGE == 0


def test_the_block_before_is_still_there(both: Any) -> None:
    source, image = both
    one = source.buffers(0, 50_000, whole=True)
    two = source.buffers(50_000, 100_000, whole=True)
    assert b"".join([*one, *two]) == image[:100_000]


def test_a_range_inside_of_a_tensor_is_not_copied() -> None:
    large = torch.arange(1 << 20, dtype=torch.int64)
    snapshot = snapshot_of(LiveStager(), DcpWriter(), {"large": large})
    (piece,) = snapshot.source.buffers(1 << 20, 2 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    assert 0 <= address - large.data_ptr() < 8 << 20


def test_where_the_system_call_is_refused(
    both: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(libc, "process_vm_writev", None)
    source, image = both
    for _ in range(2):
        assert b"".join(source.buffers(0, len(image), whole=True)) == image
    assert caplog.text.count("copying small tensors one by one") == 1
