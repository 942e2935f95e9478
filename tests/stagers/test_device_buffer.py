"""The device buffer: what lies in it needs no fence. Here CPU tensors stand for those of devices; on CUDA at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import (
    AsyncCheckpointer,
    CheckpointConfigError,
    CheckpointTimeoutError,
    TornSnapshotError,
    build_checkpointer,
)
from ckpt_component.stagers import device_buffer, zero_overhead
from ckpt_component.stagers.background_copy import BackgroundCopy
from ckpt_component.stagers.device_buffer import DeviceBuffer

ON_DEVICE = torch.device("cuda:0")
KEY = "checkpoint.stager.device_buffer_bytes"


class Rig:
    """Lanes in host memory, and a hand on when they drain, how much they have, and when the fence opens."""

    def __init__(self) -> None:
        self.drains, self.fence = threading.Event(), threading.Event()
        self.drains.set()
        self.fence.set()
        self.taken: list[tuple[torch.device, int]] = []
        self.filled: list[int] = []
        self.room: dict[torch.device, int] = {}
        self.broken: str | None = None

    def lane(self, device: torch.device) -> HostLane:
        return HostLane(self, device)


class HostLane:
    """Instead of `CudaLane`."""

    def __init__(self, rig: Rig, device: torch.device) -> None:
        self.rig, self.device = rig, device

    def memory(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.rig.room.get(self.device, nbytes):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\nSee the documentation.")
        self.rig.taken.append((self.device, nbytes))
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def fill(self, groups: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        if self.rig.broken == "fill":
            raise RuntimeError("the device fell off the bus")
        for slots, values in groups:
            torch._foreach_copy_(slots, values)
        self.rig.filled.append(sum(len(slots) for slots, _ in groups))

    def drain(self, targets: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        assert self.rig.drains.wait(30)
        if self.rig.broken == "drain":
            raise RuntimeError("the device fell off the bus")
        torch._foreach_copy_(list(targets), list(slots))


def large_ones(tensor: torch.Tensor) -> torch.device | None:
    """Scalars lie on the host, as an optimizer's step counts do."""
    return ON_DEVICE if tensor.dim() else None


Build = Callable[..., AsyncCheckpointer]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig()
    finish = BackgroundCopy._finish

    def held_back(copying: BackgroundCopy) -> BaseException | None:
        assert rig.fence.wait(30)
        return finish(copying)

    monkeypatch.setattr(BackgroundCopy, "_finish", held_back)
    yield rig
    rig.drains.set()
    rig.fence.set()


@pytest.fixture
def build(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Build:
    def built(
        limit: int,
        *overrides: str,
        device_of: Callable[[torch.Tensor], torch.device | None] = large_ones,
    ) -> AsyncCheckpointer:
        made = partial(DeviceBuffer, device_of=device_of, lane=rig.lane)
        monkeypatch.setattr(zero_overhead, "DeviceBuffer", made)
        ours = build_checkpointer("async_zero_overhead", [f"{KEY}={limit}", *overrides])
        assert isinstance(ours, AsyncCheckpointer)
        return ours

    return built


def buffer_of(ours: AsyncCheckpointer) -> DeviceBuffer:
    found = ours.saver.stager._buffer
    assert isinstance(found, DeviceBuffer)
    return found


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    optimizer.zero_grad()
    model(torch.randn(8, 4, device=device)).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("guarded", [False, True])
def test_the_optimizer_steps_at_once_and_the_snapshot_is_whole(
    guarded: bool, build: Build, rig: Rig, tmp_path: Path
) -> None:
    model, optimizer = trained()
    with build(1 << 20) as ours:
        if guarded:
            ours.guard(optimizer)
        expected, steps = copied(model), [float(state["step"]) for state in optimizer.state.values()]
        rig.drains.clear()
        stage, write = ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")
        ours.wait_staged(0)  # there is nothing to wait for
        step(model, optimizer)
        step(model, optimizer)
        assert not stage.done()
        rig.drains.set()
        write.result(30)
        loaded = ours.load(tmp_path / "one")
        assert all(torch.equal(loaded["model"][key], value) for key, value in expected.items())
        assert [float(state["step"]) for state in loaded["optimizer"]["state"].values()] == steps
        assert not torch.equal(model.state_dict()["0.weight"], expected["0.weight"])
    assert rig.filled == [4 + 2 + 2 * 4]  # parameters, running mean and variance, two moments of each parameter


def test_what_does_not_fit_keeps_the_fence(build: Build, rig: Rig, tmp_path: Path) -> None:
    state = {"one": torch.ones(16), "two": torch.ones(1000), "three": torch.ones(16)}
    with build(128) as ours:
        rig.fence.clear()
        _, write = ours.save(state, tmp_path / "one")
        with pytest.raises(CheckpointTimeoutError):
            ours.wait_staged(0.01)
        state["one"].zero_()
        state["three"].zero_()
        rig.fence.set()
        write.result(30)
        assert all(value.eq(1).all() for value in ours.load(tmp_path / "one").values())
        rig.fence.clear()
        state["one"].fill_(2)
        _, write = ours.save(state, tmp_path / "two")
        state["one"].zero_()
        state["two"].zero_()
        rig.fence.set()
        with pytest.raises(TornSnapshotError, match="'two' changed"):
            write.result(30)
        # The buffer is free again after a snapshot that was thrown away.
        ours.save(state, tmp_path / "three")[1].result(30)
    assert rig.taken == [(ON_DEVICE, 128)] and rig.filled == [2, 2, 2]


def test_what_save_would_wait_for_goes_first(build: Build, rig: Rig, tmp_path: Path) -> None:
    model, optimizer = trained()
    with build(128) as ours:  # room for a few of them; the running mean and variance are in the middle
        ours.guard(optimizer)
        ours.save({"model": model, "optimizer": optimizer}, tmp_path / "one")[1].result(30)
        [arena] = ours.saver.stager._pool._free
        split = arena._slots.plans[True]
        # Nothing but the number of batches, a scalar, and the step counts: no tensor of the device.
        assert all(split.now.slots[number].dim() == 0 for number in split.now.numbers) and split.later.numbers
        assert len(split.buffered) == 2


def test_a_save_that_finds_the_buffer_taken_copies_under_the_fence(
    build: Build, rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = {"weight": torch.full((100,), 1.0)}
    with build(1 << 20) as ours:
        rig.drains.clear()
        first, one = ours.save(state, tmp_path / "one")
        state["weight"].fill_(2)
        rig.fence.clear()
        _, two = ours.save(state, tmp_path / "two")
        assert rig.filled == [1]
        with pytest.raises(CheckpointTimeoutError):
            ours.wait_staged(0.01)
        rig.fence.set()
        ours.wait_staged(30)  # although the first still lies in the buffer
        assert not first.done()
        state["weight"].fill_(3)
        rig.drains.set()
        one.result(30)
        two.result(30)
        ours.save(state, tmp_path / "three")[1].result(30)
        for number, name in enumerate(("one", "two", "three"), 1):
            assert ours.load(tmp_path / name)["weight"].eq(number).all()
    assert rig.filled == [1, 1]
    assert caplog.text.count("the previous snapshot is still in the buffer") == 1


def test_a_device_without_the_memory_is_said_once_and_keeps_the_fence(
    build: Build, rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = torch.device("cuda:1")
    rig.room[ON_DEVICE] = 100
    state = {"here": torch.ones(1000), "there": torch.ones(1000, dtype=torch.float64)}
    with build(1 << 20, device_of=lambda tensor: other if tensor.dtype is torch.float64 else ON_DEVICE) as ours:
        for number in range(3):
            rig.fence.clear()
            state["here"].fill_(number)
            state["there"].fill_(number)
            _, write = ours.save(state, tmp_path / str(number))
            state["there"].fill_(-1)  # the other device has the memory
            rig.fence.set()
            ours.wait_staged(30)
            state["here"].fill_(-1)
            write.result(30)
            assert all(value.eq(number).all() for value in ours.load(tmp_path / str(number)).values())
    assert rig.taken == [(other, 8000)]
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith(f"{KEY}: cuda:0 has no 0.00 GB left for the buffer (CUDA out of memory. Tried")
    assert "documentation" not in said and said.endswith("copied under the fence")


def test_every_device_has_the_limit_for_itself(build: Build, rig: Rig, tmp_path: Path) -> None:
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    state = {f"{kind}.{number}": torch.full((64,), kind) for kind in (0, 1) for number in range(3)}
    with build(1024, device_of=lambda tensor: devices[int(tensor[0])]) as ours:
        ours.save(state, tmp_path / "one")[1].result(30)
        assert all(torch.equal(ours.load(tmp_path / "one")[key], value) for key, value in state.items())
    assert rig.taken == [(device, 1024) for device in devices] and rig.filled == [2, 2]


def test_memory_is_taken_once_and_anew_only_for_more(build: Build, rig: Rig, tmp_path: Path) -> None:
    with build(1000) as ours:
        ours.prewarm({"a": torch.ones(32)})
        for number, length in enumerate((32, 32, 16, 64, 32, 200)):
            state = {"a": torch.full((length,), float(number))}
            ours.save(state, tmp_path / str(number))[1].result(30)
            assert ours.load(tmp_path / str(number))["a"].eq(number).all()
        assert list(buffer_of(ours)._memory) == [ON_DEVICE]
    assert rig.taken == [(ON_DEVICE, 128), (ON_DEVICE, 256), (ON_DEVICE, 800)]
    assert not buffer_of(ours)._memory and not buffer_of(ours).numbers


def test_a_snapshot_in_the_buffer_is_saved_although_all_is_closed(
    build: Build, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, left = DeviceBuffer.close, []

    def close_and_drain(buffer: DeviceBuffer) -> None:
        close(buffer)
        left.extend(buffer._memory)
        rig.drains.set()

    monkeypatch.setattr(DeviceBuffer, "close", close_and_drain)
    state = {"weight": torch.ones(100)}
    ours = build(1 << 20)
    rig.drains.clear()
    _, write = ours.save(state, tmp_path / "one")
    state["weight"].zero_()
    ours.close()
    write.result(0)
    assert left == [ON_DEVICE] and not buffer_of(ours)._memory
    with build(0) as reader:
        assert reader.load(tmp_path / "one")["weight"].eq(1).all()


@pytest.mark.parametrize("phase", ["fill", "drain"])
def test_a_device_that_fails_fails_that_save_and_gives_the_buffer_back(
    phase: str, build: Build, rig: Rig, tmp_path: Path
) -> None:
    state = {"weight": torch.ones(100)}
    with build(1 << 20) as ours:
        rig.broken = phase
        with pytest.raises(Exception, match="fell off the bus"):
            ours.save(state, tmp_path / "one")[1].result(30)
        rig.broken = None
        rig.fence.clear()  # nothing of the next one needs it
        ours.save(state, tmp_path / "two")[1].result(30)
        assert ours.load(tmp_path / "two")["weight"].eq(1).all()


@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_tensors_of_all_kinds_come_through(writer: str, build: Build, rig: Rig, tmp_path: Path) -> None:
    base = torch.arange(12.0)
    tied = torch.arange(5.0)
    state: dict[str, Any] = {
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.arange(9).to(torch.bfloat16),
        "yes": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j, 3j]).conj(),
        "expanded": torch.tensor([7.0]).expand(4),
        "tied": tied,
        "again": tied,
        "scalar": torch.tensor(3),
        "left": base[:8],
        "right": base[4:],
    }
    expected = {key: value.clone() for key, value in state.items()}
    with build(1 << 20, f"checkpoint/writer={writer}", device_of=lambda tensor: ON_DEVICE) as ours:
        for name in ("one", "two"):
            _, write = ours.save(state, tmp_path / name)
            tied.add_(1)
            ours.wait_staged(30)  # torch_save joins those that overlap, which keep the fence
            base.add_(1)
            write.result(30)
            loaded = ours.load(tmp_path / name)
            assert all(torch.equal(loaded[key], value) for key, value in expected.items())
            tied.sub_(1)
            base.sub_(1)


def test_joined_tensors_keep_the_fence(build: Build, rig: Rig, tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {"left": base[:8], "right": base[4:], "other": torch.ones(4)}
    with build(1 << 20, "checkpoint/writer=torch_save") as ours:
        rig.fence.clear()
        _, write = ours.save(state, tmp_path / "one")
        state["other"].zero_()
        base.add_(1)
        rig.fence.set()
        with pytest.raises(TornSnapshotError, match="'left', 'right' changed"):
            write.result(30)


def test_where_copies_are_awaited_the_rest_is_copied_when_save_returns(build: Build, rig: Rig, tmp_path: Path) -> None:
    state = {"one": torch.ones(16), "two": torch.ones(1000)}
    with build(128) as ours:
        ours.saver.stager._overlap.awaits = True
        rig.fence.clear()
        rig.drains.clear()
        stage, write = ours.save(state, tmp_path / "one")
        ours.wait_staged(0)
        state["one"].zero_()
        state["two"].zero_()
        assert not stage.done()
        rig.drains.set()
        write.result(30)
        assert all(value.eq(1).all() for value in ours.load(tmp_path / "one").values())


def test_many_host_tensors_keep_the_fence(
    build: Build, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_component.stagers.copy_split._AT_ONCE_BYTES", 4)
    state = {"device": torch.ones(10), "one": torch.tensor(1.0), "two": torch.tensor(1.0)}
    with build(1 << 20) as ours:
        rig.fence.clear()
        _, write = ours.save(state, tmp_path / "one")
        state["device"].zero_()
        state["two"].zero_()
        rig.fence.set()
        with pytest.raises(TornSnapshotError, match="'two' changed"):
            write.result(30)


def test_without_a_device_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with build_checkpointer("async_zero_overhead", [f"{KEY}=1000"]) as ours:
        for number in range(3):
            ours.save({"weight": torch.ones(10)}, tmp_path / str(number))[1].result(30)  # type: ignore[index]
            assert ours.load(tmp_path / str(number))["weight"].eq(1).all()
    assert caplog.text.count(f"{KEY}=1000: no tensor is on a CUDA device, so there is nothing to buffer") == 1


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(CheckpointConfigError, match=f"{KEY} must be at least 0, got -1"):
        build_checkpointer("async_zero_overhead", [f"{KEY}=-1"])
    with pytest.raises(CheckpointConfigError, match=f"{KEY} must be at least 0, got -1"):
        zero_overhead.ZeroOverheadStager(device_buffer_bytes=-1)


class RecordingCuda:
    """Instead of `torch.cuda`: notes what is asked of which stream, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.on = "trainer"

    def Stream(self, device: torch.device) -> RecordingStream:
        return RecordingStream(self, "side")

    def current_stream(self, device: torch.device) -> RecordingStream:
        return RecordingStream(self, self.on)

    def Event(self, blocking: bool) -> RecordingStream:
        assert blocking
        return RecordingStream(self, "event")

    def device(self, device: torch.device) -> torch.no_grad:
        return torch.no_grad()

    def stream(self, stream: RecordingStream) -> Any:
        cuda = self

        class On:
            def __enter__(self) -> None:
                cuda.on = stream.name

            def __exit__(self, *_: object) -> None:
                cuda.on = "trainer"

        return On()


class RecordingStream:
    def __init__(self, cuda: RecordingCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: RecordingStream) -> None:
        self.cuda.said.append(f"{self.name} waits for {other.name}")

    def record(self, stream: RecordingStream) -> None:
        self.cuda.said.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.cuda.said.append("host waits")


def test_the_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RecordingCuda()
    copy = torch._foreach_copy_

    def noted(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        cuda.said.append(f"copy {len(targets)} on {cuda.on}")
        copy(targets, sources)

    monkeypatch.setattr(device_buffer.torch, "cuda", cuda)
    monkeypatch.setattr(device_buffer.torch, "_foreach_copy_", noted)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: cuda.said.append(f"used on {stream.name}"))
    monkeypatch.setattr(device_buffer, "_STARTED", 2)
    lane = device_buffer.CudaLane(torch.device("cpu"))
    with torch.inference_mode():
        memory = lane.memory(12)
    assert not memory.is_inference()
    slots = list(memory.view(torch.float32))
    lane.fill([(slots, [torch.tensor(float(number)) for number in range(3)])])
    assert cuda.said == [
        "trainer waits for side",
        "copy 3 on trainer",
        *["used on trainer"] * 3,
        "side waits for trainer",
    ]
    cuda.said.clear()
    targets = torch.zeros(3)
    lane.drain(list(targets), slots)
    chunk = ["on side", "event on side", "host waits"]
    assert cuda.said == [f"copy 2 {chunk[0]}", *chunk[1:], f"copy 1 {chunk[0]}", *chunk[1:]]
    assert targets.tolist() == [0, 1, 2]


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def cuda_checkpointer(limit: int) -> AsyncCheckpointer:
    ours = build_checkpointer("async_zero_overhead", [f"{KEY}={limit}"])
    assert isinstance(ours, AsyncCheckpointer)
    return ours


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("stream", ["default", "own"])
def test_cuda_the_optimizer_steps_at_once_without_a_fence(stream: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = [4, *[512] * 6, 3]
    model = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in pairwise(sizes)], torch.nn.BatchNorm1d(3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.cuda.synchronize()
    own = torch.cuda.Stream() if stream == "own" else torch.cuda.current_stream()
    with cuda_checkpointer(1 << 30) as ours, torch.cuda.stream(own):
        for number in range(4):
            step(model, optimizer)
            expected = copied(model)
            _, write = ours.save({"model": model, "optimizer": optimizer}, tmp_path / str(number))
            ours.wait_staged(0)  # there is nothing to wait for
            for _ in range(3):
                step(model, optimizer)
            write.result(60)
            loaded = ours.load(tmp_path / str(number))["model"]
            assert all(torch.equal(loaded[key].cpu(), value.cpu()) for key, value in expected.items())


@pytest.mark.gpu
@on_cuda
def test_cuda_the_copy_comes_before_whatever_the_trainer_does_next(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 24, device="cuda")
    with cuda_checkpointer(1 << 30) as ours:
        ours.prewarm({"weight": weight})
        for number in range(5):
            for _ in range(100):
                weight.add_(1)
            _, write = ours.save({"weight": weight}, tmp_path / str(number))
            weight.fill_(-1)  # at once, in the order of the stream, without any fence
            write.result(60)
            assert ours.load(tmp_path / str(number))["weight"].eq(100 if number == 0 else 99).all()


@pytest.mark.gpu
@on_cuda
def test_cuda_a_buffer_that_is_too_small_takes_what_fits(tmp_path: Path) -> None:
    state = {"small": torch.ones(1 << 10, device="cuda"), "large": torch.ones(1 << 22, device="cuda")}
    with cuda_checkpointer(1 << 13) as ours:
        _, write = ours.save(state, tmp_path / "one")
        state["small"].zero_()
        ours.wait_staged()
        state["large"].zero_()
        write.result(60)
        assert len(buffer_of(ours).numbers) == 1
        assert all(value.eq(1).all() for value in ours.load(tmp_path / "one").values())


@pytest.mark.gpu
@on_cuda
def test_cuda_a_buffer_that_is_taken_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, drain = threading.Event(), device_buffer.CudaLane.drain

    def held_back(lane: device_buffer.CudaLane, *arguments: Any) -> None:
        assert go.wait(60)
        drain(lane, *arguments)

    monkeypatch.setattr(device_buffer.CudaLane, "drain", held_back)
    weight = torch.ones(1 << 22, device="cuda")
    with cuda_checkpointer(1 << 30) as ours:
        _, one = ours.save({"weight": weight}, tmp_path / "one")
        weight.fill_(2)
        _, two = ours.save({"weight": weight}, tmp_path / "two")
        ours.wait_staged(60)
        weight.fill_(3)
        go.set()
        one.result(60)
        two.result(60)
        assert ours.load(tmp_path / "one")["weight"].eq(1).all()
        assert ours.load(tmp_path / "two")["weight"].eq(2).all()


@pytest.mark.gpu
@on_cuda
def test_cuda_without_memory_the_fence_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones(1 << 26, device="cuda")  # 256 MB
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(weight.device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with cuda_checkpointer(1 << 30) as ours:
            _, write = ours.save({"weight": weight}, tmp_path / "one")
            ours.wait_staged()
            weight.zero_()
            write.result(60)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with cuda_checkpointer(0) as reader:
        assert reader.load(tmp_path / "one")["weight"].eq(1).all()
    assert caplog.text.count("left for the buffer") == 1


@pytest.mark.gpu
@on_cuda
def test_cuda_memory_is_given_back(tmp_path: Path) -> None:
    weight = torch.ones(1 << 22, device="cuda")
    before = torch.cuda.memory_allocated()
    with cuda_checkpointer(1 << 30) as ours:
        ours.save({"weight": weight}, tmp_path / "one")[1].result(60)
        assert torch.cuda.memory_allocated() - before >= weight.nbytes
    assert torch.cuda.memory_allocated() == before
