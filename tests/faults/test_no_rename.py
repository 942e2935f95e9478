"""Storage without renames. A fake object store, puts whose answers are lost, racing attempts, late writers."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence import Record
from faults.invariants import MANIFEST_MODE, blank_state, differences, state_of
from faults.object_store import ObjectStore
from faults.test_kill_points import ASYNC_VICTIMS, MANY, enumerate_kills
from forging import edit_manifest
from forker import Forker
from inside import tidied

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFencedError,
    CheckpointManager,
    CheckpointSaveError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import Unfinished, discard, quarantine
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.manifest import check_files, data_folder, read_manifest
from ckpt_component.core.commit.names import MANIFEST, MEGATRON, QUARANTINED
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage import locate
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token

pytestmark = pytest.mark.slow

POINTER = MEGATRON.pointer
RANK = {"rank": 0, "files": [{"name": "data", "size": 4}]}
#: As steps are called that an attempt of another host stands in.
FOREIGN_TOKEN = "0badc0de-12345678"


@pytest.fixture
def uploads(tmp_path: Path) -> str:
    path = tmp_path / "uploads"
    path.mkdir()
    return str(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def written(fs: FileStorage, root: Path, step: int, owner: str = "") -> Attempt:
    """An attempt that lacks nothing but its commit."""
    attempt = commit.new_attempt(fs, str(root / MEGATRON.folder(step)), new_token(), owner)
    commit.begin(attempt)
    fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
    return attempt


def committed(fs: FileStorage, root: Path, step: int) -> Attempt:
    attempt = written(fs, root, step)
    commit.publish(attempt, [RANK], {".metadata": b"m"}, {"format": "x"})
    return attempt


def at_of(folder: Path) -> Path:
    """Where the files of a checkpoint are."""
    manifest = read_manifest(FileStorage(), str(folder))
    assert manifest is not None
    check_files(FileStorage(), data_folder(FileStorage(), str(folder), manifest), manifest)
    return Path(data_folder(FileStorage(), str(folder), manifest))


def age(path: Path) -> None:
    os.utime(path, (1, 1))


# --- the commit -----------------------------------------------------------------------------------------------------


def test_the_put_of_the_manifest_is_the_last_thing_and_alone_makes_the_checkpoint(root: Path, uploads: str) -> None:
    seen: list[tuple[str, list[int]]] = []
    store = ObjectStore(
        uploads, before_put=lambda path: seen.append((path, scan_steps(FileStorage(), str(root), MEGATRON).committed))
    )
    attempt = committed(store, root, 1)
    assert [os.path.relpath(path, attempt.staging) for path, _ in seen][-1] == f"../{MANIFEST}"
    assert all(steps == [] for _, steps in seen)
    assert scan_steps(store, str(root), MEGATRON).committed == [1]
    assert sorted(os.listdir(attempt.target)) == sorted([attempt.token, MANIFEST])
    assert sorted(os.listdir(at_of(Path(attempt.target)))) == [".metadata", "data"]


def test_a_put_that_the_mount_did_twice_finds_itself_and_is_a_commit(root: Path, uploads: str) -> None:
    class Twice(ObjectStore):
        def put_new(self, path: str, data: bytes, draft: str) -> None:
            super().put_new(path, data, draft)
            super().put_new(path, data, draft)

    committed(Twice(uploads), root, 1)
    assert scan_steps(FileStorage(), str(root), MEGATRON).committed == [1]


@pytest.mark.parametrize(("outcome", "found"), [("lost", [1]), ("refused", [])])
def test_an_outcome_that_cannot_be_seen_is_said_and_the_disk_decides_later(
    outcome: str, found: list[int], root: Path, uploads: str
) -> None:
    store = ObjectStore(uploads, puts=[outcome])
    attempt = written(store, root, 1)
    store.unreadable = 1000
    with pytest.raises(CheckpointSaveError, match="Could not find out whether .* was committed.*next start decides"):
        commit.publish(attempt, [RANK], {}, {}, 0.2)
    commit.abandon(attempt)
    assert os.path.isfile(os.path.join(attempt.staging, "data"))  # it may be a checkpoint's
    store.unreadable = 0
    age(Path(attempt.staging))
    age(Path(attempt.target))
    Unfinished(store, str(root), MEGATRON).sweep()
    assert scan_steps(store, str(root), MEGATRON).committed == found
    assert os.listdir(root) == [MEGATRON.folder(step) for step in found]


@pytest.mark.parametrize("kind", ["store", "links"])
def test_racing_attempts_commit_exactly_once(kind: str, root: Path, uploads: str) -> None:
    """Six clients, one step; each either commits or is told that another did, and touches no other's files."""
    for step in range(1, 16):
        start, told = threading.Barrier(6), list[Any]()

        def race(step: int = step, start: threading.Barrier = start, told: list[Any] = told) -> None:
            fs = ObjectStore(uploads) if kind == "store" else FileStorage(durable=False, atomic_rename=False)
            attempt = commit.new_attempt(fs, str(root / MEGATRON.folder(step)), new_token())
            start.wait(30)
            try:
                commit.begin(attempt)
                fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
                commit.publish(attempt, [RANK], {".metadata": b"m"}, {})
                told.append(attempt.token)
            except CheckpointExistsError:
                commit.abandon(attempt)
                told.append(None)
            except BaseException as error:
                told.append(error)

        threads = [threading.Thread(target=race) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        (winner,) = [token for token in told if token is not None]
        assert len(told) == 6 and at_of(root / MEGATRON.folder(step)).name == winner
        assert sorted(os.listdir(root / MEGATRON.folder(step))) == sorted([winner, MANIFEST])


def test_a_late_writer_of_an_abandoned_attempt_harms_nobody(root: Path, uploads: str) -> None:
    store = ObjectStore(uploads)
    old = written(store, root, 1)
    late = store.create(os.path.join(old.staging, "late"))
    commit.abandon(old)
    assert os.listdir(root) == []
    new = committed(store, root, 1)
    store.close(late)  # its object appears where nobody looks any more
    with pytest.raises(CheckpointExistsError, match="taken by another save"):
        commit.publish(old, [{"rank": 0, "files": []}], {}, {})
    assert at_of(Path(new.target)).name == new.token
    assert scan_steps(store, str(root), MEGATRON).committed == [1]
    age(Path(old.staging))
    assert Unfinished(store, str(root), MEGATRON).sweep() == [f"iter_0000001/{old.token}"]
    assert at_of(Path(new.target)).name == new.token


def test_a_run_that_lost_the_root_puts_nothing(root: Path, uploads: str) -> None:
    store = ObjectStore(uploads)
    first = FencingToken(store, str(root))
    first.acquire()
    attempt = written(store, root, 1, first.token)
    FencingToken(store, str(root)).acquire()
    with pytest.raises(CheckpointFencedError):
        commit.publish(attempt, [RANK], {}, {})
    assert scan_steps(store, str(root), MEGATRON).committed == []


def test_what_is_in_the_way_of_a_save(root: Path, uploads: str) -> None:
    store = ObjectStore(uploads)
    written(store, root, 1)
    written(store, root, 1)  # two attempts side by side
    (root / "iter_0000002").mkdir()
    (root / "iter_0000002" / "theirs").write_text("kept")
    (root / "iter_0000003").symlink_to(root / "iter_0000001")
    committed(store, root, 4)
    for step in (2, 3, 4):
        with pytest.raises(CheckpointExistsError):
            written(store, root, step)
    with pytest.raises(CheckpointExistsError):
        written(FileStorage(), root, 1)  # where folders are renamed, all is in the way


# --- what is left, and what is damaged ------------------------------------------------------------------------------


def test_a_sweep_takes_dead_attempts_of_this_host_alone(root: Path, uploads: str) -> None:
    store = ObjectStore(uploads)
    dead, alive, young = (written(store, root, step) for step in (1, 2, 3))
    loser = written(store, root, 4)
    winner = committed(store, root, 4)
    beside = written(store, root, 5)
    broken = committed(store, root, 6)
    Path(broken.target, MANIFEST).write_bytes(b"{")  # whose data it names cannot be known
    kept = committed(store, root, 7)
    quarantine(store, kept.target)
    foreign = root / "iter_0000005" / FOREIGN_TOKEN
    foreign.mkdir()
    (root / "iter_0000008").mkdir()
    lock = AttemptLock(store, alive)
    for path in (*root.glob("iter_*/*-*"), *root.glob("iter_*")):
        age(path)
    os.utime(young.staging)
    try:
        assert Unfinished(store, str(root), MEGATRON).living() == [f"iter_0000002/{alive.token}"]
        gone = Unfinished(store, str(root), MEGATRON).sweep()
    finally:
        lock.close()
    assert set(gone) == {
        f"iter_0000001/{dead.token}",
        f"iter_0000004/{loser.token}",
        f"iter_0000005/{beside.token}",
    }
    assert not (root / "iter_0000001").exists() and not (root / "iter_0000008").exists()
    assert all(Path(attempt.staging, "data").exists() for attempt in (alive, young, winner, broken, kept))
    scan = scan_steps(store, str(root), MEGATRON)
    assert (scan.committed, sorted(scan.unfinished), sorted(scan.damaged)) == ([4], [2, 3, 5], [6])
    assert scan.torn == scan.foreign == {}
    # A run that renames folders takes away the same, and leaves empty folders, which are anybody's, alone.
    age(Path(young.staging))
    assert Unfinished(FileStorage(), str(root), MEGATRON).sweep() == [
        f"iter_0000002/{alive.token}",
        f"iter_0000003/{young.token}",
    ]


def test_retirement_takes_the_manifest_first_and_leaves_other_attempts(root: Path, uploads: str) -> None:
    store = ObjectStore(uploads)
    attempt, other = committed(store, root, 1), committed(store, root, 2)
    loser = root / "iter_0000002" / FOREIGN_TOKEN
    loser.mkdir()
    (loser / "data").write_bytes(b"x")
    store.log.clear()
    assert discard(store, attempt.target) and discard(store, other.target)
    assert store.log[0] == f"unlink {attempt.target}/{MANIFEST}"
    assert os.listdir(root) == ["iter_0000002"] and os.listdir(root / "iter_0000002") == [FOREIGN_TOKEN]
    # So does a run that renames folders: a rename would take the other attempt along.
    again = committed(store, root, 2)
    assert discard(FileStorage(), again.target)
    assert os.listdir(root / "iter_0000002") == [FOREIGN_TOKEN] and (loser / "data").exists()


@pytest.mark.parametrize("damage", ["data", "manifest", "at"])
@pytest.mark.parametrize("renames", [False, True])
def test_quarantine_keeps_the_data_and_frees_the_name(damage: str, renames: bool, root: Path, uploads: str) -> None:
    store = ObjectStore(uploads)
    attempt = committed(store, root, 1)
    living = written(store, root, 9)
    os.rename(living.staging, root / "iter_0000001" / living.token)
    os.rmdir(living.target)
    lock = AttemptLock(store, commit.new_attempt(store, attempt.target, living.token))
    manifest = Path(attempt.target, MANIFEST)
    if damage == "data":
        Path(attempt.staging, "data").write_bytes(b"123")
    elif damage == "manifest":
        manifest.write_bytes(b"{")
    else:
        shutil.rmtree(attempt.staging)
    assert list(scan_steps(store, str(root), MEGATRON).damaged) == [1]
    content = manifest.read_bytes()
    where = Path(quarantine(FileStorage() if renames else store, attempt.target))
    lock.close()
    assert (where / QUARANTINED).read_bytes() == content and not manifest.exists()
    assert not Path(attempt.target, living.token, QUARANTINED).exists()
    assert where == Path(attempt.staging) or damage == "at"
    scan = scan_steps(store, str(root), MEGATRON)
    assert (scan.committed, scan.damaged, scan.torn, scan.foreign) == ([], {}, {}, {})
    new = committed(store, root, 1)
    assert scan_steps(store, str(root), MEGATRON).committed == [1]
    age(where)
    Unfinished(store, str(root), MEGATRON).sweep()
    assert discard(store, new.target)
    assert (where / QUARANTINED).exists()


@pytest.mark.parametrize("at", ["..", ".", "", "/etc", "a/b", 7, None, ["x"], "0badc0de-12345678/..", "x" * 300])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(at: Any, root: Path, uploads: str) -> None:
    attempt = committed(ObjectStore(uploads), root, 1)
    edit_manifest(Path(attempt.target), lambda manifest: manifest.__setitem__("at", at))
    assert list(scan_steps(FileStorage(), str(root), MEGATRON).damaged) == [1]
    with build_checkpointer("sync") as ours, pytest.raises(CheckpointCorruptError, match="folder of its files"):
        ours.load(attempt.target)


@pytest.mark.parametrize("stands_there", ["link", "fifo", "file", "nothing"])
def test_the_folder_of_the_files_is_a_folder(stands_there: str, root: Path, uploads: str) -> None:
    attempt = committed(ObjectStore(uploads), root, 1)
    edit_manifest(Path(attempt.target), lambda manifest: manifest.__setitem__("format", "dcp"))
    outside = root / "outside"
    os.rename(attempt.staging, outside)
    if stands_there == "link":
        os.symlink(outside, attempt.staging)
    elif stands_there == "fifo":
        os.mkfifo(attempt.staging)
    elif stands_there == "file":
        Path(attempt.staging).write_text("x")
    with build_checkpointer("sync") as ours, pytest.raises(CheckpointCorruptError, match=attempt.token):
        ours.load(attempt.target)
    quarantine(FileStorage(atomic_rename=False), attempt.target)
    assert sorted(os.listdir(outside)) == [".metadata", "data"]


# --- whole saves ----------------------------------------------------------------------------------------------------


def manager_in(root: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    usual = ["save.at_end=false", "keep.last=2", "timeouts.visible=0.2", "durability=process_crash"]
    return build_manager(preset, [*(f"checkpoint.{each}" for each in usual), *overrides], dir=root)


def restored(root: Path, *overrides: str) -> int | None:
    target = blank_state()
    with manager_in(root, *overrides) as manager:
        step = manager.restore(target)
    assert step is None or differences(target, state_of(step)) == []
    return step


def test_a_run_on_an_object_store(root: Path, uploads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves, retires, resumes, quarantines and saves again, without one rename; a lost answer is no failed save."""
    import torch.distributed.checkpoint as dcp

    store = ObjectStore(uploads)
    monkeypatch.setattr(locate, "storage_at", lambda _, **of: store)
    with manager_in(root, MANIFEST_MODE) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        store.puts = ["lost"]
        manager.save(3, state_of(3))
        assert tidied(manager).steps() == [2, 3]
        store.puts = ["refused"]
        with pytest.raises(CheckpointSaveError, match="Input/output error"):
            manager.save(4, state_of(4))
        assert manager.steps() == [2, 3]
        with pytest.raises(CheckpointExistsError):
            build_checkpointer("sync", [MANIFEST_MODE]).save(state_of(3), root / "iter_0000003")
    with manager_in(
        root, MANIFEST_MODE, "checkpoint.on_error=retry", "checkpoint.retry.backoff_seconds=0.01"
    ) as manager:
        store.puts = ["refused", "torn", "lost"]
        manager.save(4, state_of(4))
        assert manager.reports[-1].attempts == 3 and tidied(manager).steps() == [3, 4]
    assert (root / POINTER).read_text() == "4"
    assert set(os.listdir(root)) == {"events", "iter_0000003", "iter_0000004", POINTER, ".ckpt-owner.json"}
    assert restored(root, MANIFEST_MODE) == 4
    found = {"counts": torch.zeros(7, dtype=torch.int64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=str(at_of(root / "iter_0000004")), no_dist=True)
    assert found["counts"].eq(4).all()
    kept = at_of(root / "iter_0000004")
    (kept / "__0_0.distcp").write_bytes(b"")
    with manager_in(root, MANIFEST_MODE) as manager:
        assert manager.restore(blank_state()) == 3
        assert (root / POINTER).read_text() == "3"
        for step in (4, 5, 6):
            manager.save(step, state_of(step))
        assert tidied(manager).steps() == [5, 6]
    assert restored(root, MANIFEST_MODE) == 6
    assert (kept / QUARANTINED).exists() and (kept / ".metadata").exists()
    assert [name for name in os.listdir(root) if name.startswith(".ckpt-")] == [".ckpt-owner.json"]


def test_what_one_mode_saved_the_other_loads_and_retires(root: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        return {"weight": torch.full((100,), float(step))}

    modes = (MANIFEST_MODE, "checkpoint.commit=rename")
    for step in range(1, 7):
        target = state(0)
        with manager_in(root, modes[step % 2], preset="async_persistent") as manager:
            assert manager.restore(target) == (step - 1 or None)
            assert target["weight"].eq(step - 1).all()
            manager.save(step, state(step))
            manager.wait()
            assert tidied(manager).steps() == [step - 1, step][-step:]
        has_folder = at_of(root / MEGATRON.folder(step)) != root / MEGATRON.folder(step)
        assert has_folder == (modes[step % 2] == MANIFEST_MODE)
    assert len(os.listdir(root)) == 5


def test_a_step_whose_attempt_lives_is_waited_for_and_not_quarantined(root: Path) -> None:
    fs = FileStorage(atomic_rename=False)
    with manager_in(root, MANIFEST_MODE) as manager:
        manager.save(1, state_of(1))
    attempt = written(fs, root, 2)
    lock = AttemptLock(fs, attempt)
    (root / "iter_0000003" / FOREIGN_TOKEN).mkdir(parents=True)
    for path in (*root.glob("iter_*/*-*"), *root.glob("iter_*")):
        age(path)
    try:
        for mode in (MANIFEST_MODE, "checkpoint.commit=rename"):
            assert restored(root, mode, "checkpoint.timeouts.close=0.2") == 1
    finally:
        lock.close()
    assert Path(attempt.staging, "data").exists() and (root / "iter_0000003" / FOREIGN_TOKEN).exists()
    assert restored(root, MANIFEST_MODE) == 1
    assert not Path(attempt.target).exists() and (root / "iter_0000003" / FOREIGN_TOKEN).exists()


def test_an_overwritten_pointer_follows_no_link_and_waits_for_no_fifo(root: Path) -> None:
    precious = root / "precious"
    precious.write_text("1")
    fs = FileStorage(atomic_rename=False)
    (root / POINTER).symlink_to(precious)
    fs.write_over(str(root / POINTER), b"2")
    assert precious.read_text() == "1" and (root / POINTER).read_text() == "2"
    os.unlink(root / POINTER)
    os.mkfifo(root / POINTER)
    fs.write_over(str(root / POINTER), b"longer")
    fs.write_over(str(root / POINTER), b"3")
    assert (root / POINTER).read_text() == "3"


def test_direct_io_is_refused() -> None:
    with pytest.raises(CheckpointConfigError, match=r"checkpoint\.writer\.io=direct.*checkpoint\.commit=manifest"):
        build_checkpointer("async_persistent", [MANIFEST_MODE, "checkpoint.writer.io=direct"])


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("preset", "victim", "stride"),
    [("async_persistent", "self", 31), ("async_persistent", "other", 23)],
)
def test_kill_at_every_operation(
    preset: str, victim: str, stride: int, forker: Forker, tmp_path: Path, record_property: Record
) -> None:
    record_property("kills", kills_without_violation(forker, tmp_path, preset, victim, stride))


@pytest.mark.soak
@pytest.mark.parametrize(("preset", "victim"), [("sync", "self"), *ASYNC_VICTIMS])
def test_kill_at_every_single_operation(
    preset: str, victim: str, forker: Forker, tmp_path: Path, record_property: Record
) -> None:
    record_property("kills", kills_without_violation(forker, tmp_path, preset, victim, 1))


def kills_without_violation(forker: Forker, folder: Path, preset: str, victim: str, stride: int) -> int:
    kills, wrong = enumerate_kills(forker, folder, preset, victim, [MANIFEST_MODE], stride)
    print(f"{preset}, {victim}: {kills} kills, {len(wrong)} violations")
    assert not wrong, "\n".join(wrong)
    assert 40 // stride - 1 <= kills < MANY // stride
    return kills
