"""The newest snapshot stays in memory: every save is whole there first, and a save to memory alone writes nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rank_threads import rank_threads

from ckpt_component import CheckpointError, CheckpointFencedError, CheckpointGivenUpError, CheckpointSaveError
from ckpt_component.callers.write_callers import InlineCaller, MemoryCaller
from ckpt_component.core.commit.cleanup import discard
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.coordination import Coordinator, LocalCoordinator
from ckpt_component.core.image.arena import Arena
from ckpt_component.core.image.unchanged_files import FileReuse
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.core.storage.storage import Storage
from ckpt_component.core.writing.request import WriteRequest
from ckpt_component.errors import WorkerDiedError
from ckpt_component.events import CheckpointListener, SaveReport
from ckpt_component.events.recorder import EventRecorder
from ckpt_component.hosts.host_memory import HostMemory
from ckpt_component.hosts.keep import run_keep_job
from ckpt_component.hosts.snapshots import SnapshotMemory, TieredSaveQueue
from ckpt_component.hosts.stores import MemoryStore
from ckpt_component.loading import Reader
from ckpt_component.saving.context import NoRun, SaveContext
from ckpt_component.saving.pipeline import SavePipeline
from ckpt_component.saving.retry import ErrorPolicy
from ckpt_component.saving.save_queue import SaveHandle, SaveQueue
from ckpt_component.stagers import SharedMemoryStager
from ckpt_component.state.unchanged_tensors import UnchangedTensors
from ckpt_component.writers import DcpWriter

IN_MEMORY = "host://runs/one@1f2e3d4c-0a0b0c0d"
TIMEOUTS = ResolvedTimeouts(stage=20.0, write=30.0, close=20.0)


class SnapshotStore(MemoryCaller):
    """Keeps in this process what a server would keep in its own.

    Attributes:
        files: what is kept
        failures: raised by the next requests; None: that one succeeds
        start_failures: as `failures`, raised when it is to be ready for a request
        events: what it was asked for, in order
    """

    def __init__(self) -> None:
        super().__init__(lambda timeout: cast(Any, None))
        self.files = MemoryStore()
        self.failures: list[Exception | None] = []
        self.start_failures: list[CheckpointError] = []
        self.refusal: CheckpointError | None = None
        self.events: list[str] = []
        self.arenas: list[Arena] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def prepare(self, timeout: float) -> None:
        """There is no process that could have ended, unless a test says so."""
        if self.start_failures:
            raise self.start_failures.pop(0)

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        self.events.append(os.path.basename(request.attempt.target))
        assert self.go_on.wait(60)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        arena = request.source
        assert isinstance(arena, Arena)
        self.arenas.append(arena)
        return dict(run_keep_job(request, self.files, (arena.number, arena.shared_descriptor())))

    def progress(self) -> int:
        return 0

    def settle(self) -> None:
        """There is no process that would finish the save."""

    def retire(self, keep: Sequence[str], timeout: float) -> dict[int, bool]:
        self.events.append(f"only {' '.join(map(os.path.basename, keep))}")
        if self.refusal is not None:
            raise self.refusal
        older = [file.path for file in self.files.listed(IN_MEMORY) if "/iter_" in file.path]
        self.files.delete([file for file in older if not file.startswith(tuple(f"{path}/" for path in keep))])
        held = self.files.held()
        return {arena.number: arena.number in held for arena in self.arenas}

    def close(self, timeout: float = 60.0) -> None:
        self.events.append("closed")


class Writing(InlineCaller):
    """Writes in the background, each save as soon as `go_on` is set; fails if told so."""

    in_other_process = True

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.failures: list[Exception] = []

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        assert self.go_on.wait(60)
        if self.failures:
            raise self.failures.pop(0)
        return super().run(request, deadline)


class Heard(CheckpointListener):
    def __init__(self) -> None:
        self.heard: list[tuple[str, str, bool]] = []

    def on_staged(self, report: SaveReport) -> None:
        self.heard.append(("staged", os.path.basename(report.path), report.memory))

    def on_committed(self, report: SaveReport) -> None:
        self.heard.append(("committed", os.path.basename(report.path), report.memory))

    def on_failed(self, report: SaveReport) -> None:
        self.heard.append(("failed", os.path.basename(report.path), report.memory))


class Claim(FencingToken):
    """Counts how often the folder is asked for."""

    asked = 0

    def acquire(self) -> None:
        self.asked += 1
        super().acquire()


class Run:
    """A run that keeps its newest snapshot, with the servers of its ranks in this process."""

    def __init__(
        self,
        folder: Path,
        *,
        ranks: Coordinator | None = None,
        clients: list[SnapshotStore] | None = None,
        policy: ErrorPolicy | None = None,
        in_flight: int = 1,
        reuse: FileReuse | None = None,
        timeouts: ResolvedTimeouts = TIMEOUTS,
    ) -> None:
        ranks = ranks or LocalCoordinator()
        self.folder = folder
        self.clients = clients or [SnapshotStore()]
        self.client = self.clients[ranks.rank]
        self.memory = HostMemory(lambda path: [each.files for each in self.clients], own=self.client.files)
        self.caller, self.stager, writer = Writing(), SharedMemoryStager(), DcpWriter()
        self.stager.connect(writer, ranks=ranks, shared=True, timeout=20.0, kept=1, in_flight=in_flight, reuse=reuse)
        self.listener, self.whole = Heard(), list[str]()
        self.became_whole = threading.Condition()
        disk = file_storage(durable=False)

        def storage_of(path: str) -> Storage:
            return self.memory if self.memory.holds(path) else disk

        run = NoRun(storage_of)
        self.claim = Claim(disk, str(folder))
        run.ownership = self.claim  # type: ignore[assignment]
        run.files, run.manifest_fields = {"run.json": b"{}"}, {"run": "1f2e3d4c"}
        context = SaveContext(
            ranks, storage_of, timeouts, run, policy or ErrorPolicy(), EventRecorder(listeners=[self.listener])
        )
        context = context if reuse is None else replace(context, reuse=reuse)
        queue = partial(
            TieredSaveQueue, memory=SnapshotMemory(self.client, writer, self.memory, IN_MEMORY, [self._kept])
        )
        self.pipeline = SavePipeline(self.stager, self.caller, writer, context, queue)

    def _kept(self, report: SaveReport) -> None:
        with self.became_whole:
            self.whole.append(os.path.basename(report.path))
            self.became_whole.notify_all()

    def wait_whole(self, count: int) -> None:
        """Wait until so many snapshots have become whole in memory."""
        with self.became_whole:
            assert self.became_whole.wait_for(lambda: len(self.whole) >= count, 20)

    @staticmethod
    def path(name: str) -> str:
        return f"{IN_MEMORY}/{name}"

    def save(self, step: int, *, memory: bool = False) -> SaveHandle:
        name = MEGATRON.folder(step)
        path = self.path(name) if memory else str(self.folder / name)
        return self.pipeline.save(state_of(step), path, step=step)[1]

    def in_memory(self) -> list[int]:
        return scan_steps(self.memory, IN_MEMORY, MEGATRON).committed

    def on_disk(self) -> list[int]:
        return scan_steps(file_storage(), str(self.folder), MEGATRON).committed

    def loaded(self, step: int, *, memory: bool) -> Any:
        root = IN_MEMORY if memory else str(self.folder)
        reader = Reader(0, 1, storage_of=lambda path: self.memory if memory else file_storage())
        return reader.read(os.path.join(root, MEGATRON.folder(step)))[0]

    def heard(self) -> list[tuple[str, str, bool]]:
        self.pipeline.events.drain(20.0)
        return self.listener.heard

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.caller.go_on.set()
        self.client.go_on.set()
        try:
            self.pipeline.close()
        finally:
            if self.pipeline.ranks.world_size == 1:  # a queue that was given up ends after the call
                for thread in threading.enumerate():
                    if thread.name.startswith("ckpt-keep"):
                        thread.join(20)
            self.client.files.delete([file.path for file in self.client.files.listed("")])


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = arenas_open()
    yield
    assert arenas_open() == before


def arenas_open() -> int:
    """How many descriptors this process has of memory for images."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed just now
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("ckpt-arena" in link for link in links)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((300, 7), float(step)), "step": step}


def holds(state: Any, step: int) -> bool:
    return bool(state["weight"].eq(step).all()) and state["step"] == step


def test_a_save_is_in_memory_and_in_its_folder_with_the_same_bytes(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        report = run.save(1).result(60)
        run.wait_whole(1)
        assert run.in_memory() == run.on_disk() == [1]
        assert holds(run.loaded(1, memory=True), 1) and holds(run.loaded(1, memory=False), 1)
        assert report.path == str(tmp_path / MEGATRON.folder(1)) and not report.memory
        manifests = [
            scan_steps(storage, root, MEGATRON).manifests[1]
            for storage, root in ((run.memory, IN_MEMORY), (file_storage(), str(tmp_path)))
        ]
        for name in ("attempt", "run", "format", "world_size"):
            assert manifests[0][name] == manifests[1][name]
        assert "run.json" in {file["name"] for file in manifests[0]["files"]}


def test_a_large_tensor_is_verified_in_memory_as_on_disk(tmp_path: Path) -> None:
    """It is summed in several steps, by several threads."""
    large = torch.arange(3 << 20, dtype=torch.int64)
    with Run(tmp_path) as run:
        path = run.path(MEGATRON.folder(1))
        run.pipeline.save({"first": large, "second": large + 1, "step": 1}, path, step=1)[1].result(60)
        loaded = run.loaded(1, memory=True)
    assert loaded["first"].equal(large) and loaded["second"].equal(large + 1)


def test_a_snapshot_is_whole_in_memory_while_older_ones_are_being_written(tmp_path: Path) -> None:
    with Run(tmp_path, in_flight=2) as run:
        run.caller.go_on.clear()
        first, second = run.save(1), run.save(2)
        run.wait_whole(2)
        assert run.in_memory() == [2] and holds(run.loaded(2, memory=True), 2)
        assert not first.done() and not second.done() and run.on_disk() == []
        run.caller.go_on.set()
        second.result(60)
        assert run.on_disk() == [1, 2] and holds(run.loaded(1, memory=False), 1)
        assert run.in_memory() == [2], "what is written changes nothing in memory"


@pytest.mark.parametrize("memory", [True, False])
def test_only_the_newest_snapshot_stays_and_the_older_ones_give_their_memory_back(tmp_path: Path, memory: bool) -> None:
    before = {*threading.enumerate()}
    with Run(tmp_path) as run:
        for step in range(1, 6):
            run.save(step, memory=memory).result(60)
            run.wait_whole(step)
        assert run.in_memory() == [5] and holds(run.loaded(5, memory=True), 5)
        assert len({arena.number for arena in run.client.arenas}) == 2
    assert all(arena.closed for arena in run.client.arenas) and run.stager.host_bytes == 0
    assert run.client.events[-1] == "closed"
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("ckpt-save")]


def test_a_save_to_memory_alone_writes_nothing_and_is_reported_as_such(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        durable = run.save(1).result(60)
        report = run.save(2, memory=True).result(60)
        assert run.on_disk() == [1] and run.in_memory() == [2]
        assert report.memory and report.path == run.path(MEGATRON.folder(2)) and report.outcome == "committed"
        assert report.bytes > 0 and report.reused == 0
        assert report.stall_s < report.committed_s, "training goes on meanwhile"
        assert [each.step for each in run.pipeline.reports] == [1, 2]
        assert run.pipeline.last_report == durable, "the last one that stays"
        assert report.event()["memory"] is True and durable.event()["memory"] is False


def test_listeners_are_told_of_each_save_once(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1).result(60)
        run.wait_whole(1)
        run.save(2, memory=True).result(60)
        one, two = MEGATRON.folder(1), MEGATRON.folder(2)
        assert run.heard() == [
            ("staged", one, False),
            ("committed", one, False),
            ("staged", two, True),
            ("committed", two, True),
        ]


def test_the_log_has_each_save_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Run(tmp_path) as run:
        run.save(1).result(60)
        run.wait_whole(1)
    for phase in ("staged", "written", "committed"):
        assert caplog.text.count(f"{MEGATRON.folder(1)} {phase}") == 1


def test_a_snapshot_that_memory_does_not_take_is_a_warning_and_the_older_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path) as run:
        run.save(1).result(60)
        run.wait_whole(1)
        run.client.failures = [WorkerDiedError("the snapshot server has ended")]
        assert run.save(2).result(60).outcome == "committed"
        run.save(3).result(60)
        run.wait_whole(2)
        assert run.on_disk() == [1, 2, 3] and run.in_memory() == [3]
        assert run.whole == [MEGATRON.folder(1), MEGATRON.folder(3)]
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "training continues" in warnings[0] and "the snapshot server has ended" in warnings[0]
    assert [report.outcome for report in run.pipeline.reports] == ["committed"] * 3


def test_what_was_in_memory_stays_there_when_a_newer_one_fails(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, memory=True).result(60)
        run.client.failures = [CheckpointSaveError("no memory")]
        with pytest.raises(CheckpointSaveError, match="no memory"):
            run.save(2, memory=True).result(60)
        assert run.in_memory() == [1] and holds(run.loaded(1, memory=True), 1)
        run.client.start_failures = [WorkerDiedError("the snapshot server cannot be started")]
        with pytest.raises(CheckpointSaveError, match="the snapshot server cannot be started"):
            run.save(3, memory=True).result(60)
        assert run.in_memory() == [1]
        run.save(4, memory=True).result(60)
        assert run.in_memory() == [4]


def test_a_snapshot_that_fails_because_another_run_has_taken_over_says_so(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, memory=True).result(60)
        Claim(file_storage(durable=False), str(tmp_path)).acquire()
        run.client.failures = [CheckpointSaveError("no memory")]
        with pytest.raises(CheckpointFencedError):
            run.save(2, memory=True).result(60)


def test_a_save_whose_snapshot_no_thread_can_keep_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with Run(tmp_path) as run:
        with monkeypatch.context() as changed, pytest.raises(RuntimeError, match="can't start new thread"):
            changed.setattr(SaveQueue, "run_after_saves", refuse)
            run.save(1)
        run.save(2).result(60)
        run.wait_whole(1)
        assert run.on_disk() == run.in_memory() == [2] and holds(run.loaded(2, memory=True), 2)
        assert not run.stager.busy


def test_a_save_that_its_folder_does_not_take_is_in_memory_all_the_same(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.caller.failures = [CheckpointSaveError("the disk is broken")]
        with pytest.raises(CheckpointSaveError, match="the disk is broken"):
            run.save(1).result(60)
        run.wait_whole(1)
        assert run.on_disk() == [] and holds(run.loaded(1, memory=True), 1)


@pytest.mark.parametrize(
    "policy", [ErrorPolicy(), ErrorPolicy(warn=True), ErrorPolicy(attempts=2, backoff_seconds=0.0)]
)
def test_a_save_to_memory_alone_that_fails_is_a_warning_whatever_the_policy(
    policy: ErrorPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next snapshot comes soon, and no checkpoint depends on it."""
    with Run(tmp_path, policy=policy) as run:
        run.client.failures = [CheckpointSaveError("no memory")]
        run.save(1, memory=True)
        run.pipeline.wait()
        run.save(2, memory=True).result(60)
        assert [(each.outcome, each.memory) for each in run.pipeline.reports] == [("failed", True), ("committed", True)]
        assert run.heard()[1:] == [
            ("failed", MEGATRON.folder(1), True),
            ("staged", MEGATRON.folder(2), True),
            ("committed", MEGATRON.folder(2), True),
        ]
        assert run.in_memory() == [2]
    assert "training continues (what is saved to storage is not affected): no memory" in caplog.text


def test_a_save_to_memory_alone_that_cannot_begin_is_a_warning_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path) as run:
        sparse = {"weight": torch.ones(3).to_sparse()}
        run.pipeline.save(sparse, run.path(MEGATRON.folder(1)), step=1)
        assert "training continues (what is saved to storage is not affected): " in caplog.text
        with pytest.raises(CheckpointError, match="weight"):
            run.pipeline.save(sparse, str(tmp_path / MEGATRON.folder(2)), step=2)
        run.save(3, memory=True).result(60)
        assert [(each.outcome, each.memory) for each in run.pipeline.reports] == [("failed", True), ("committed", True)]


def test_closing_gives_a_snapshot_up_that_does_not_become_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeouts = ResolvedTimeouts(stage=0.2, write=0.2, close=0.2, visible=0.2)
    with Run(tmp_path, timeouts=timeouts) as run:
        run.client.go_on.clear()
        run.save(1).result(60)
        run.pipeline.close()
        run.client.go_on.set()
    assert "a snapshot was still not whole in memory after" in caplog.text


def test_a_step_that_is_in_memory_is_not_put_there_again_when_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path) as run:
        run.save(1, memory=True).result(60)
        run.save(1).result(60)
        assert run.on_disk() == run.in_memory() == [1]
        run.save(2).result(60)
        run.wait_whole(2)
        assert run.whole == [MEGATRON.folder(1), MEGATRON.folder(2)] and run.in_memory() == [2]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_failures_in_a_row_are_those_of_one_place(tmp_path: Path) -> None:
    """Otherwise memory that works would hide a disk that does not."""
    with Run(tmp_path, policy=ErrorPolicy(warn=True, give_up_after=2)) as run:
        run.caller.failures = [CheckpointSaveError("the disk is broken") for _ in range(2)]
        run.save(1).exception(60)
        run.save(2, memory=True).result(60)
        with pytest.raises(CheckpointGivenUpError, match="2 saves in a row"):
            run.save(3).result(60)


def test_memory_is_not_refused_because_the_disk_is_full(tmp_path: Path) -> None:
    with Run(tmp_path, policy=ErrorPolicy(min_free_bytes=1 << 60)) as run:
        assert run.save(1, memory=True).result(60).memory
        with pytest.raises(CheckpointError, match="free"):
            run.save(2).result(60)
        run.wait_whole(2)
        assert run.in_memory() == [2]


def test_the_folder_is_claimed_once_before_something_is_in_memory(tmp_path: Path) -> None:
    """A restore believes the servers of the owner alone; and a disk that hangs keeps nothing from memory."""
    with Run(tmp_path) as run:
        run.save(1, memory=True).result(60)
        assert run.claim.other() is None and run.claim.asked == 1
        for step in (2, 3):
            run.save(step, memory=True).result(60)
        assert run.claim.asked == 1


def test_two_queues_claim_the_folder_one_after_the_other(tmp_path: Path) -> None:
    for number in range(5):
        with Run(tmp_path / str(number)) as run:
            run.save(1).result(60)
            run.wait_whole(1)
            assert run.on_disk() == run.in_memory() == [1] and run.claim.asked == 2


def test_memory_that_somebody_reads_is_not_filled_again_before_he_lets_go(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, memory=True).result(60)
        folder = next(
            os.path.dirname(file.path) for file in run.client.files.listed("") if file.path.endswith("distcp")
        )
        with run.client.files.opened(folder):
            run.save(2, memory=True).result(60)
            for step in (3, 4):
                run.save(step, memory=True).result(60)
            assert run.client.arenas[0].number not in {arena.number for arena in run.client.arenas[1:]}
        for step in (5, 6, 7):
            run.save(step, memory=True).result(60)
        assert run.client.arenas[0] in run.client.arenas[4:]
        assert run.in_memory() == [7]


def test_an_older_snapshot_that_cannot_be_dropped_does_not_fail_the_newer_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path) as run:
        run.save(1, memory=True).result(60)
        run.client.refusal = WorkerDiedError("the snapshot server has ended")
        assert run.save(2, memory=True).result(60).outcome == "committed"
        assert run.client.arenas[0].closed, "somebody may read it"
        run.client.refusal = None
        run.save(3, memory=True).result(60)
        assert run.in_memory() == [3]
    assert caplog.text.count("an older snapshot could not be dropped: the snapshot server has ended") == 1


def test_memory_is_free_for_the_next_save_when_the_last_one_is_whole(tmp_path: Path) -> None:
    with Run(tmp_path, in_flight=2) as run:
        run.caller.go_on.clear()
        for step in (1, 2, 3):  # three images: two that are being written, one of them and the newest in memory
            run.save(step)
            run.wait_whole(step)
        assert run.stager.busy
        run.caller.go_on.set()
        assert run.stager.wait_free(time.monotonic() + 60)
        run.pipeline.wait()
        assert run.on_disk() == [1, 2, 3] and run.in_memory() == [3]


@pytest.mark.parametrize("durable", [True, False])
def test_what_does_not_change_is_shared_with_the_last_checkpoint_in_memory_too(durable: bool, tmp_path: Path) -> None:
    """It is not in the image, so memory has the checkpoint's file, also when that checkpoint is deleted."""
    reuse = FileReuse(UnchangedTensors(["base*"]), checksum=DcpWriter().algorithm, in_memory=True)
    base, shared = torch.arange(50_000.0), list[int]()
    with Run(tmp_path, reuse=reuse) as run:
        for step in (1, 2, 3):
            path = str(tmp_path / MEGATRON.folder(step)) if step < 3 or durable else run.path(MEGATRON.folder(step))
            state = {"base": base, "weight": torch.full((100_000,), float(step)), "step": step}
            if step == 3:  # written, and in order after what is shared
                state["base.more"] = base + 1
            shared.append(run.pipeline.save(state, path, step=step)[1].result(60).reused)
            run.wait_whole(step)
            assert run.in_memory() == [step]
            loaded = run.loaded(step, memory=True)
            assert loaded["base"].equal(base) and holds(loaded, step)
        for step in run.on_disk():
            discard(file_storage(), str(tmp_path / MEGATRON.folder(step)))
        loaded = run.loaded(3, memory=True)
        assert loaded["base"].equal(base) and loaded["base.more"].equal(base + 1)
    assert shared[1] > 200_000


def on_ranks(folder: Path, train: Any, failing: Mapping[int, list[Exception | None]] | None = None) -> list[Any]:
    """What `train` returns or raises on two ranks, each with a server of its own."""
    clients = [SnapshotStore(), SnapshotStore()]
    for rank, failures in (failing or {}).items():
        clients[rank].failures = failures

    def run(ranks: Any) -> Any:
        with Run(folder, ranks=ranks, clients=clients, policy=ErrorPolicy(min_free_bytes=None)) as job:
            return train(job)

    with rank_threads(2) as on_all:
        return on_all(run)


def test_a_snapshot_is_whole_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    """One server fails for the second save: then the first one stays on both."""

    def train(run: Run) -> Any:
        for step in (1, 2):
            run.save(step).result(60)
        run.pipeline.ranks.run_on_leader("first look", lambda: run.wait_whole(1), time.monotonic() + 60)
        while len(run.client.events) < 3:
            time.sleep(0.01)
        found = run.pipeline.ranks.run_on_leader("look", run.in_memory, time.monotonic() + 60)
        run.save(3).result(60)
        run.pipeline.ranks.run_on_leader("last look", lambda: run.wait_whole(2), time.monotonic() + 60)
        return found, run.pipeline.ranks.run_on_leader("steps", run.in_memory, time.monotonic() + 60)

    assert on_ranks(tmp_path, train, {1: [None, CheckpointSaveError("no memory")]}) == [([1], [3])] * 2


def test_ranks_save_to_memory_and_to_storage_in_turn(tmp_path: Path) -> None:
    def train(run: Run) -> Any:
        saves = [run.save(step, memory=step % 3 != 0) for step in range(1, 8)]
        reports = [save.result(60).memory for save in saves]
        run.pipeline.ranks.run_on_leader("whole", lambda: run.wait_whole(7), time.monotonic() + 60)
        here = run.pipeline.ranks.run_on_leader("steps", run.in_memory, time.monotonic() + 60)
        run.pipeline.ranks.run_on_leader("end", lambda: None, time.monotonic() + 60)
        return reports, here, run.on_disk()

    expected = [step % 3 != 0 for step in range(1, 8)], [7], [3, 6]
    assert on_ranks(tmp_path, train) == [expected, expected]
