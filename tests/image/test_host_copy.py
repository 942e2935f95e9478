"""Tasks and threads give the same bytes as one copy, for any mix of sizes, dtypes and strides."""

from __future__ import annotations

import ctypes
import errno
import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_component.core import libc
from ckpt_component.core.image.copy import CopyPlan, CopyTasks, copy_on_host


def mixed() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    large = torch.randn(1500, 2000, generator=generator)  # three tasks
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
        torch._neg_view(torch.randn(50, generator=generator)),
        torch.complex(large[:3], large[3:6]).conj(),
        torch.randn(60, 70, generator=generator).t(),
        torch.randn(600, 700, generator=generator).t(),
    ]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_arrives(threads: int) -> None:
    sources = mixed()
    slots = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    copy_on_host(slots, sources, threads)
    for slot, source in zip(slots, sources, strict=True):
        assert torch.equal(slot, source.detach())
        assert not slot.requires_grad


def test_a_failing_task_is_raised() -> None:
    with pytest.raises(RuntimeError):
        copy_on_host([torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(4)], threads=2)


def test_a_large_tensor_is_cut_as_little_as_leaves_work_for_all() -> None:
    large, small = torch.rand(20 << 20), torch.rand(100)  # 80 MB
    slots = [torch.zeros_like(large), torch.zeros_like(small)]
    threads = torch.get_num_threads()
    try:
        for count, tasks in ((1, 2), (2, 4), (64, 10)):
            torch.set_num_threads(count)
            plan = CopyPlan(slots, [large, small])
            assert len(plan.tasks) == tasks + 1
            CopyTasks(plan, [large, small]).finish(2)
            assert_equal(slots, [large, small])
    finally:
        torch.set_num_threads(threads)


def assert_equal(slots: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for slot, source in zip(slots, sources, strict=True):
        assert torch.equal(slot, source.detach())


@pytest.mark.parametrize("known", [True, False], ids=["addresses given", "addresses looked up"])
def test_tensors_that_moved_are_copied_from_where_they_are(known: bool) -> None:
    sources = mixed()
    slots = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    plan = CopyPlan(slots, sources)
    moved = [
        torch.empty_like(source, memory_format=torch.preserve_format).copy_(source) + 1 for source in sources[3:703]
    ]
    later = [*sources[:3], *moved, *sources[703:]]
    addresses = torch.tensor([source.data_ptr() for source in later]) if known else None
    CopyTasks(plan, later, addresses).finish(2)
    assert_equal(slots, later)


def refused(*_: Any) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def half(pid: int, origins: int, pieces: int, targets: int, more: int, flags: int) -> int:
    ctypes.memset(ctypes.c_uint64.from_address(targets).value, 255, 1)
    return 1


@pytest.mark.parametrize(("call", "why"), [(None, "C library"), (refused, "not permitted"), (half, "1 of")])
def test_where_the_system_call_fails_copies_are_made_one_by_one_and_it_is_logged_once(
    call: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libc, "process_vm_writev", call)
    sources = [torch.full((1000,), number) for number in range(3000)]
    slots = [torch.zeros_like(source) for source in sources]
    with caplog.at_level(logging.WARNING):
        copy_on_host(slots, sources, threads=1)
    assert_equal(slots, sources)
    assert len(caplog.records) == 1 and why in caplog.text


def test_small_tensors_are_gathered_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreach(*_: Any) -> None:
        raise AssertionError("torch was asked to copy")

    monkeypatch.setattr(torch, "_foreach_copy_", foreach)
    sources = [torch.full((number % 300,), float(number)) for number in range(3000)]
    slots = [torch.zeros_like(source) for source in sources]
    copy_on_host(slots, sources, threads=2)
    assert_equal(slots, sources)


class FakeCuda:
    """Instead of `torch.cuda`: notes what is asked of streams, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: str) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.calls.append(f"side of {device} waits for {other}"))

    def current_stream(self, device: str) -> str:
        return f"trainer's of {device}"

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.calls.append("event"), synchronize=lambda: self.calls.append("host waits")
        )

    def device(self, device: str) -> Any:
        return nullcontext()

    stream = device

    def source(self, device: str) -> Any:
        used = partial(self.calls.append, f"tensor of {device} used")
        return SimpleNamespace(is_cuda=True, device=device, nbytes=8, record_stream=lambda stream: used())


@pytest.mark.parametrize("fails", [False, True])
def test_copies_from_devices_follow_the_trainers_work_and_end_with_the_rest(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda()
    sources = [cuda.source("one"), torch.ones(2), cuda.source("two"), cuda.source("one")]
    slots = [torch.zeros(2) for _ in sources]
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *lists, non_blocking: cuda.calls.append(f"copy {len(lists[0])}")
    )
    plan = CopyPlan(slots, sources)
    assert str(plan.device) == "one"
    tasks = CopyTasks(plan, sources)
    one = ["side of one waits for trainer's of one", "copy 2", *["tensor of one used"] * 2, "event"]
    two = ["side of two waits for trainer's of two", "copy 1", "tensor of two used", "event"]
    assert cuda.calls == [*one, *two]
    if fails:
        monkeypatch.setattr(plan, "gather", None)
        with pytest.raises(TypeError):
            tasks.finish(2)
    else:
        tasks.finish(2)
        assert slots[1].tolist() == [1, 1]
    assert cuda.calls[-2:] == ["host waits"] * 2
