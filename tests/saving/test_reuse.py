"""What did not change is not written again, and every checkpoint is whole by itself."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from waiting import eventually

from ckpt_component import (
    CheckpointConfigError,
    CheckpointManager,
    CheckpointSaveError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.core.commit.names import MANIFEST, MEGATRON
from ckpt_component.core.image.unchanged_files import FileBytes
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.storage import Held, Storage
from ckpt_component.events import read_events
from ckpt_component.saving.base_files import BaseFiles
from ckpt_component.testing import SimulatedBucket, SimulatedObjects

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BASE_BYTES = 8 << 18
PRESETS = ["async_persistent", "async_temporal", "async_zero_overhead", "sync"]
SCRIPT = Path(__file__).parent / "scripts" / "reusing.py"


class Training:
    """A frozen base, an adapter that changes at every step, and what each saved step must hold."""

    def __init__(self, folder: Path, preset: str = "async_persistent", *overrides: str, **options: Any) -> None:
        self.folder = folder
        self.base = {f"layer{number}": torch.randn(BASE_BYTES // 8 // 4) for number in range(8)}
        self.adapter = {"a": torch.zeros(300), "b": torch.zeros(20_000)}
        self.saved: dict[int, dict[str, Any]] = {}
        self.step = 0
        self.options = options
        self._overrides = (preset, [f"checkpoint.dir={folder}", "checkpoint.save.at_end=false", *overrides])

    @property
    def state(self) -> dict[str, Any]:
        return {"base": self.base, "adapter": self.adapter, "step": self.step}

    def manager(self) -> CheckpointManager:
        return build_manager(*self._overrides, **self.options)

    def save(self, manager: CheckpointManager) -> int:
        """Train a step and save it; returns the bytes that were written."""
        self.step += 1
        for tensor in self.adapter.values():
            tensor.add_(1)
        self.saved[self.step] = {
            key: {name: value.clone() for name, value in part.items()} if isinstance(part, dict) else part
            for key, part in self.state.items()
        }
        manager.save(self.step, self.state)
        manager.wait()
        report = manager.reports[-1]
        assert report.outcome == "committed"
        if report.reused:
            assert report.reused + report.bytes > BASE_BYTES
        return report.bytes

    def path(self, step: int) -> Path:
        return self.folder / f"iter_{step:07}"

    def holds(self, *steps: int) -> bool:
        """Whether the checkpoints hold what was saved, read by stock DCP."""
        for step in steps or self.saved:
            found = {
                "base": {name: torch.zeros_like(value) for name, value in self.base.items()},
                "adapter": {name: torch.zeros_like(value) for name, value in self.adapter.items()},
            }
            dcp.load(found, checkpoint_id=self.path(step), no_dist=True)
            for part, values in found.items():
                for name, value in values.items():
                    assert torch.equal(value, self.saved[step][part][name]), f"step {step} has another {part}.{name}"
        return True


class Counted(FileStorage):
    """Counts how often each file is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Counter[Held]()

    def hold(self, path: str) -> Held | None:
        held = super().hold(path)
        if held is not None:
            self.held[held] += 1
        return held

    def release(self, held: Held) -> None:
        super().release(held)
        self.held[held] -= 1


class Deleting(FileStorage):
    """Another process deletes a folder once its manifest was read."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def read(self, path: str, limit: int) -> bytes:
        data = super().read(path, limit)
        if path == os.path.join(self._folder, MANIFEST):
            shutil.rmtree(self._folder)
        return data


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def shared(one: Path, other: Path) -> set[str]:
    """The files of two checkpoints that are one file."""
    inodes = {path.stat().st_ino for path in one.iterdir()}
    return {path.name for path in other.iterdir() if path.stat().st_ino in inodes}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_frozen_tensors_are_written_until_they_are_known_to_be_frozen(tmp_path: Path, preset: str) -> None:
    training = Training(tmp_path, preset, "checkpoint.keep.last=null")
    with training.manager() as manager:
        written = [training.save(manager) for _ in range(5)]
    assert all(each > BASE_BYTES for each in written[:2]) and all(each < 150_000 for each in written[2:]), written
    assert shared(training.path(2), training.path(5)) and not shared(training.path(1), training.path(2))
    assert training.holds()


def test_the_second_save_shares_what_is_declared(tmp_path: Path) -> None:
    training = Training(tmp_path, "async_persistent", "checkpoint.reuse.frozen=[base.*]")
    with training.manager() as manager:
        assert training.save(manager) > BASE_BYTES
        assert training.save(manager) < 150_000
    assert training.holds()


def test_the_second_save_shares_the_parameters_of_a_module_that_need_no_gradient(tmp_path: Path) -> None:
    base, head = torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 8)
    model = torch.nn.Sequential(base.requires_grad_(False), head)
    with build_manager("async_persistent", [f"checkpoint.dir={tmp_path}", "checkpoint.save.at_end=false"]) as manager:
        for step in (1, 2):
            with torch.no_grad():
                head.weight.add_(1)
            manager.save(step, {"model": model})
            manager.wait()
    assert manager.reports[1].bytes < 100_000 < (2 << 20) < manager.reports[1].reused


def test_a_loop_that_offers_its_state_at_each_step_shares_from_its_second_save_on(training: Training) -> None:
    with build_manager(
        "async_persistent", [f"checkpoint.dir={training.folder}", "checkpoint.save.every_steps=3"]
    ) as manager:
        for step in range(1, 10):
            for tensor in training.adapter.values():
                tensor.add_(1)
            manager.maybe_save(step, training.state)
    assert [report.bytes < 150_000 for report in manager.reports] == [False, True, True]


def test_what_is_shared_needs_no_room(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    with training.manager() as manager:
        for _ in range(3):
            training.save(manager)
        monkeypatch.setattr(FileStorage, "free_bytes", lambda files, path: BASE_BYTES // 2)
        assert training.save(manager) < 150_000


def test_off_writes_everything(tmp_path: Path) -> None:
    training = Training(tmp_path, "async_persistent", "checkpoint.reuse.mode=off")
    with training.manager() as manager:
        assert all(training.save(manager) > BASE_BYTES for _ in range(4))
    assert not shared(training.path(3), training.path(4))


@pytest.mark.slow
def test_a_state_that_changes_everywhere_is_written_as_before(tmp_path: Path) -> None:
    names = []
    for mode in ("auto", "off"):
        training = Training(tmp_path / mode, "async_persistent", f"checkpoint.reuse.mode={mode}")
        with training.manager() as manager:
            for _ in range(4):
                for tensor in training.base.values():
                    tensor.add_(1)
                assert training.save(manager) > BASE_BYTES
        names.append(sorted((path.name, path.stat().st_size) for path in training.path(4).glob("*.distcp")))
    assert names[0] == names[1]


def by_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data + 1


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[-1] += 1


def by_foreign_code(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr() + tensor.nbytes // 2, 255, 1)


def by_other_storage(tensor: torch.Tensor) -> None:
    tensor.set_(torch.randn(tensor.shape).untyped_storage(), 0, tensor.shape, (1,))


def by_fsdp(tensor: torch.Tensor) -> None:
    """Free the storage and allocate it again, as FSDP does with a parameter that it has gathered."""
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    storage.resize_(0)
    storage.resize_(nbytes)
    tensor.copy_(torch.randn(tensor.shape))


CHANGES = [by_data, by_numpy, by_foreign_code, by_other_storage, by_fsdp, lambda tensor: tensor.mul_(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "change"),
    [*(("sync", change) for change in CHANGES), *(("async_zero_overhead", change) for change in CHANGES[:2])],
)
def test_a_change_that_torch_may_not_see_is_saved(
    tmp_path: Path, preset: str, change: Callable[[torch.Tensor], Any]
) -> None:
    training = Training(tmp_path, preset, "checkpoint.keep.last=null")
    with training.manager() as manager:
        for _ in range(3):
            training.save(manager)
        change(training.base["layer5"])
        assert training.save(manager) > BASE_BYTES  # one file has the base, because it is small
        assert training.save(manager) > BASE_BYTES * 7 / 8  # without the tensor that changed
        assert training.save(manager) < 150_000 + BASE_BYTES / 8
    assert training.holds()


def test_weights_that_were_offloaded_and_returned_are_shared(training: Training) -> None:
    with training.manager() as manager:
        for _ in range(3):
            training.save(manager)
        for name, tensor in training.base.items():
            training.base[name] = tensor.clone()
        assert training.save(manager) < 150_000
        assert training.save(manager) < 150_000
    assert training.holds(4, 5)


def test_a_layer_that_trains_again_costs_its_own_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path)
    with training.manager() as manager:
        for _ in range(3):
            training.save(manager)
        for _ in range(4):
            training.base["layer0"].add_(1)
            written = training.save(manager)
        assert written < 150_000 + BASE_BYTES / 8
    assert training.holds(5, 6, 7)


def test_each_checkpoint_is_whole_when_all_others_are_deleted(training: Training) -> None:
    with training.manager() as manager:
        for _ in range(3):
            training.save(manager)
        for step in (1, 2, 3):
            shutil.rmtree(training.path(step))
        assert training.save(manager) > BASE_BYTES  # copied from the open file, to which no path leads
        shutil.rmtree(training.path(4))
        assert training.save(manager) > BASE_BYTES
        assert training.save(manager) < 150_000
    assert training.holds(5, 6)


def test_keep_deletes_checkpoints_and_not_what_others_share(tmp_path: Path) -> None:
    training = Training(tmp_path, "async_persistent", "checkpoint.keep.last=1")
    with training.manager() as manager:
        for _ in range(6):
            training.save(manager)
    assert training.holds(6)
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.distcp")) < BASE_BYTES + 500_000


def test_the_next_run_shares_the_files_of_the_run_before(training: Training) -> None:
    for last, expected in ((3, [True, True, False]), (6, [True, False, False])):
        with training.manager() as manager:
            target = {"base": {name: torch.zeros_like(value) for name, value in training.base.items()}}
            assert manager.restore({**training.state, **target}) == (last - 3 or None)
            written = [training.save(manager) for _ in range(3)]
        assert [each > BASE_BYTES for each in written] == expected
    assert training.holds(4, 5, 6)


DECLARED = "checkpoint.reuse.frozen=[base.*]"


@pytest.mark.parametrize("whole", [True, False], ids=["run", "checkpoint"])
def test_a_run_over_a_base_stores_what_differs(tmp_path: Path, whole: bool) -> None:
    first = Training(tmp_path / "first", "sync", DECLARED)
    with first.manager() as manager:
        first.save(manager)
    base = first.folder if whole else first.path(1)
    second = Training(tmp_path / "second", "sync", DECLARED, f"checkpoint.reuse.base={base}")
    second.base = {name: value.clone() for name, value in first.base.items()}
    with second.manager() as manager:
        assert second.save(manager) < 150_000
    shutil.rmtree(first.folder)
    assert second.holds()


def over(base: dict[str, torch.Tensor], folder: Path, *overrides: str) -> Training:
    """A run that trains over a copy of a base."""
    training = Training(folder, "sync", DECLARED, *overrides)
    training.base = {name: value.clone() for name, value in base.items()}
    return training


def test_large_files_of_a_base_are_shared_and_closed(tmp_path: Path) -> None:
    """Larger than what is read at once to learn whether they are the same."""
    storage, large = Counted(), {"layer0": torch.randn((9 << 20) // 4)}
    options = {"storage_of": lambda path: storage}
    first = over(large, tmp_path / "first")
    second = over(large, tmp_path / "second", f"checkpoint.reuse.base={first.folder}")
    for training in (first, second):
        training.options.update(options)
        with training.manager() as manager:
            training.save(manager)
    assert manager.reports[-1].bytes < 150_000 < (9 << 20) <= manager.reports[-1].reused
    assert second.holds() and storage.held
    gc.collect()
    assert not any(storage.held.values())


def test_other_folders_are_looked_in_where_one_has_nothing_is_damaged_or_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Training(tmp_path / "first", "sync", DECLARED)
    another = Training(tmp_path / "another", "sync", DECLARED)
    for training in (first, another):
        with training.manager() as manager:
            training.save(manager)
    asked: list[dict[int, FileBytes]] = []

    def find(files: BaseFiles, wanted: Mapping[int, FileBytes], storage: Storage, elsewhere: bool) -> dict[int, Any]:
        asked.append(dict(wanted))
        return {}

    monkeypatch.setattr(BaseFiles, "find", find)
    second = over(first.base, tmp_path / "second")
    with second.manager() as manager:
        second.save(manager)
    monkeypatch.undo()
    damaged, deleted = tmp_path / "damaged", tmp_path / "deleted"
    damaged.mkdir()
    (damaged / MANIFEST).write_text("{")
    for folder in (damaged, deleted, another.path(1)):
        storage = Deleting(str(deleted))
        shutil.copytree(first.path(1), deleted)
        folders = [str(folder), str(first.folder)]
        found = BaseFiles(partial(list, folders), storage, MEGATRON).find(asked[0], storage, False)
        assert found.keys() == asked[0].keys() != set(), folder
        shutil.rmtree(deleted, ignore_errors=True)


def test_a_damaged_base_is_not_shared(tmp_path: Path) -> None:
    first = Training(tmp_path / "first", "sync", DECLARED)
    with first.manager() as manager:
        first.save(manager)
    path = max(first.path(1).iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    second = Training(tmp_path / "second", "sync", DECLARED, f"checkpoint.reuse.base={first.folder}")
    second.base = {name: value.clone() for name, value in first.base.items()}
    with second.manager() as manager:
        assert second.save(manager) > BASE_BYTES
    assert second.holds()


def test_a_base_of_other_types_with_the_same_bytes_is_not_shared(tmp_path: Path) -> None:
    first = Training(tmp_path / "first", "sync", DECLARED)
    with first.manager() as manager:
        first.save(manager)
    second = Training(tmp_path / "second", "sync", DECLARED, f"checkpoint.reuse.base={first.folder}")
    second.base = {name: value.view(torch.int32) for name, value in first.base.items()}
    with second.manager() as manager:
        assert second.save(manager) > BASE_BYTES
    assert second.holds()


@pytest.mark.parametrize("build", [build_manager, build_checkpointer])
def test_a_base_that_does_not_exist_is_refused(tmp_path: Path, build: Callable[..., Any]) -> None:
    text = f"checkpoint.reuse.base={tmp_path}/typo does not exist; name the folder of a run"
    with pytest.raises(CheckpointConfigError, match=re.escape(text)):
        build("sync", [f"checkpoint.dir={tmp_path}/run", f"checkpoint.reuse.base={tmp_path}/typo"])


class NoLinks(FileStorage):
    """A file system without hard links."""

    def share(self, held: Held, path: str) -> bool:
        link, os.link = os.link, _no_link
        try:
            return super().share(held, path)
        finally:
            os.link = link


def _no_link(*_: Any, **__: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_without_hard_links_files_are_copied_with_one_line_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage: Storage = NoLinks()
    training = Training(tmp_path, "sync", storage_of=lambda path: storage)
    with training.manager() as manager:
        for _ in range(5):
            training.save(manager)
    assert not shared(training.path(4), training.path(5)) and training.holds(3, 4, 5)
    (line,) = [record.getMessage() for record in caplog.records if "a hard link was refused" in record.getMessage()]
    assert line.startswith("iter_0000003: ")


def test_in_a_bucket_the_store_copies_what_did_not_change(tmp_path: Path) -> None:
    objects = SimulatedObjects()
    bucket = SimulatedBucket(objects)
    training = Training(Path("/runs/one"), "sync", "checkpoint.keep.last=1", storage_of=lambda path: bucket)
    with training.manager() as manager:
        written = [training.save(manager) for _ in range(5)]
        assert [each > BASE_BYTES for each in written] == [True, True, False, False, False]
        for step in range(1, 6):  # what the next save would share is not there
            for path in objects.walk(str(training.path(step))):
                objects.remove(path)
        with pytest.raises(CheckpointSaveError, match="No such file"):
            manager.save(6, training.state)
        training.step = 6
        assert training.save(manager) > BASE_BYTES
        assert training.save(manager) < 150_000
        found = {**training.state, "base": {name: torch.zeros_like(value) for name, value in training.base.items()}}
    with training.manager() as manager:
        assert manager.restore(found) == 8
    assert all(torch.equal(found["base"][name], value) for name, value in training.base.items())


def test_an_upload_sends_a_file_that_checkpoints_share_once(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    training = Training(slow, "sync", f"checkpoint.local.dir={fast}", "checkpoint.keep.last=null")
    with training.manager() as manager:
        for step in range(1, 6):
            training.save(manager)
            eventually((training.path(step) / "manifest.json").exists, what=f"step {step} is not uploaded")
    assert shared(training.path(3), training.path(5)) and training.holds()
    events = list(read_events(fast))
    sent = [event["bytes"] for event in events if event["event"] == "upload"]
    assert [each > BASE_BYTES for each in sent] == [True, True, False, False, False]


class Full(FileStorage):
    """A disk that is full while `is_full`."""

    is_full = False

    def write(self, fd: int, buffers: Any, offset: int) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().write(fd, buffers, offset)


def test_a_failed_save_changes_nothing_for_the_next(tmp_path: Path) -> None:
    storage = Full()
    training = Training(tmp_path, "sync", "checkpoint.keep.last=null", storage_of=lambda path: storage)
    with training.manager() as manager:
        for _ in range(3):
            training.save(manager)
        for change in (False, True):
            if change:
                training.base["layer1"].add_(1)
            storage.is_full = True
            with pytest.raises(CheckpointSaveError, match="No space left"):
                manager.save(training.step + 1, training.state)
            storage.is_full = False
            training.save(manager)
        training.save(manager)
        assert training.save(manager) < 150_000 + BASE_BYTES / 8
    assert training.holds()


@pytest.mark.slow
def test_each_rank_shares_its_own_files(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "save_some", 2, tmp_path)
    run_ranks(SCRIPT, "resume", 1, tmp_path)


@pytest.mark.slow
def test_what_fsdp_trains_is_not_expected_to_be_the_same(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "train_by_fsdp", 2, tmp_path)


def test_files_are_shared_in_one_storage_only(tmp_path: Path) -> None:
    bucket, files = SimulatedBucket(SimulatedObjects()), FileStorage()
    training = Training(tmp_path, "sync", DECLARED)
    found = {"base": {name: torch.zeros_like(value) for name, value in training.base.items()}}
    storage_of = {"/runs": bucket}.get
    with build_checkpointer(
        "sync", [DECLARED], storage_of=lambda path: storage_of(os.path.dirname(path)) or files
    ) as checkpointer:
        for path in (f"{tmp_path}/one", "/runs/two", f"{tmp_path}/three", f"{tmp_path}/four"):
            training.adapter["a"].add_(1)
            checkpointer.save({"base": training.base, "adapter": training.adapter}, path)
        for path in ("/runs/two", f"{tmp_path}/three"):
            checkpointer.load(path, found)
            assert all(torch.equal(found["base"][name], value) for name, value in training.base.items())
    assert shared(tmp_path / "three", tmp_path / "four") and not shared(tmp_path / "one", tmp_path / "three")


def test_a_writer_that_shares_nothing_plans_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    training = Training(tmp_path, "sync", "checkpoint/writer=torch_save")
    with training.manager() as manager:
        assert all(training.save(manager) > BASE_BYTES for _ in range(4))
    assert "the structure changed" not in caplog.text


def test_a_pattern_that_matches_nothing_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(tmp_path, "sync", "checkpoint.reuse.frozen=[base.*,bse.layer1]")
    with training.manager() as manager:
        for _ in range(3):
            training.save(manager)
    (line,) = [record.getMessage() for record in caplog.records if "reuse.frozen" in record.getMessage()]
    assert line == (
        "checkpoint.reuse.frozen: 'bse.layer1' matches no tensor of 64 KB or more on this rank; did you mean "
        "'base.layer1'?"
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["checkpoint.reuse.mode=off", DECLARED], "shares none. Use checkpoint.reuse.mode=auto"),
        (["checkpoint.reuse.base=.", "checkpoint.reuse.mode=off"], "shares none. Use checkpoint.reuse.mode=auto"),
        ([DECLARED, "checkpoint/writer=torch_save"], "Use checkpoint/writer=dcp"),
    ],
)
def test_what_would_do_nothing_is_refused(tmp_path: Path, overrides: list[str], text: str) -> None:
    with pytest.raises(CheckpointConfigError, match=re.escape(text)):
        build_manager("sync", [f"checkpoint.dir={tmp_path}", *overrides])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preset", ["async_persistent", "async_zero_overhead"])
def test_tensors_of_a_device_are_shared_by_their_copies(tmp_path: Path, preset: str) -> None:
    training = Training(tmp_path, preset, "checkpoint.keep.last=null")
    for part in (training.base, training.adapter):
        part.update({name: value.cuda() for name, value in part.items()})
    with training.manager() as manager:
        written = [training.save(manager) for _ in range(4)]
        training.base["layer2"].data = training.base["layer2"].data + 1
        written.append(training.save(manager))
    assert [each > BASE_BYTES for each in written] == [True, True, False, False, True]
    for step, state in training.saved.items():
        training.saved[step] = {
            key: {name: value.cpu() for name, value in part.items()} if isinstance(part, dict) else part
            for key, part in state.items()
        }
    training.base = {name: value.cpu() for name, value in training.base.items()}
    training.adapter = {name: value.cpu() for name, value in training.adapter.items()}
    assert training.holds()
