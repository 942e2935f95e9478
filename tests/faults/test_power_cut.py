"""The power goes at every file operation of a save with retirement, on a real ext4 (a loop device; needs root).

The same rig with a disk that takes no folder syncs must show violations, or it could not see any. And what it leaves of
random operations must be what the simulated disk may leave.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence import Record
from faults.lives import KEEP
from faults.mounts import LOG_FLUSH, NO_LOG_FLUSH
from faults.random_files import play
from faults.workloads import newest_ack
from forker import Forker
from strides import first_of

from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.testing import Disk as SimulatedDisk, DiskFile, SimulatedFiles

pytestmark = pytest.mark.slow

MANY = 300
PRESETS, FLAGS = ("sync", "async_persistent"), (LOG_FLUSH, NO_LOG_FLUSH)


class Disk:
    """An ext4 in the fork server's own mounts, whose power can be cut."""

    def __init__(self, forker: Forker, folder: Path) -> None:
        self.forker, self.folder = forker, str(folder / "disk")
        self.image = str(folder / "image")
        os.mkdir(self.folder)
        forker.here("faults.mounts:make_ext4", image=self.image, megabytes=24)
        self.mount()

    def mount(self) -> None:
        self.forker.here("faults.mounts:mount_ext4", image=self.image, folder=self.folder)

    def cut(self, flag: int, running: list[int]) -> None:
        """The power goes, and with it every process, the given ones and their children; then the machine is back."""
        self.forker.here("faults.mounts:cut_power", folder=self.folder, flag=flag)
        children = [
            int(child)
            for pid in running
            if os.path.exists(f"/proc/{pid}")
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
        for pid in [*running, *children]:
            with contextlib.suppress(ProcessLookupError):  # it noticed the end of another one, and ended
                os.kill(pid, signal.SIGKILL)
        for pid in running:
            self.forker.wait(pid)
        assert self.forker.drain() == []
        self.unmount()
        self.mount()

    def unmount(self) -> None:
        self.forker.here("faults.mounts:unmount", folder=self.folder)


@pytest.fixture
def disk(forker: Forker, tmp_path: Path) -> Iterator[Disk]:
    if forker.unmountable:
        pytest.skip(forker.unmountable)
    try:
        found = Disk(forker, tmp_path)
    except AssertionError as error:
        if os.geteuid() == 0 and os.path.exists("/dev/loop-control") and os.environ.get("CKPT_NEEDS_LOOP"):
            raise
        pytest.skip(f"no ext4 on a loop device here: {str(error).strip().splitlines()[-1]}")
    yield found
    found.unmount()


def enumerate_cuts(
    disk: Disk,
    folder: Path,
    preset: str,
    flag: int,
    also: str = "",
    bare: bool = False,
    first: int = 1,
    stride: int = 1,
    until: str | None = None,
) -> tuple[int, list[str]]:
    """Cut the power at operation 1, 2, 3 ... of a save, and after its end.

    With `stride` at every few operations from `first` on; with `until` no longer than until such a text is found. Returns how many operations there were, and what was wrong.
    """
    forker, acks, wrong = disk.forker, str(folder / "acks"), []
    lives = 0  # a root that was found damaged is left for a new one
    for number in range(first, MANY, stride):
        log = str(folder / f"ops{number}")
        pid = forker.fork(
            "faults.workloads:crash_round",
            root=f"{disk.folder}/root{lives}",
            preset=preset,
            acks=f"{acks}{lives}",
            failpoint=f"any:nth={number}:action=stop{also}",
            log=log,
            bare=bare,
        )
        ended = forker.wait(pid, fired=log)
        fired = read_log(f"{log}.fired")
        stopped = ended.stopped is not None
        if stopped:
            disk.cut(flag, [pid])
        else:
            assert ended.code == 0, ended.output
            disk.cut(flag, [])
        acked = newest_ack(f"{acks}{lives}")
        found = forker.run("faults.workloads:check", root=f"{disk.folder}/root{lives}", acks=f"{acks}{lives}")
        at = f"power cut {flag} at {number} ({fired[-1] if stopped else 'end'}), acknowledged {acked}"
        wrong += [f"{at}: {text}" for text in found]
        lives += bool(found)
        if not stopped or (until and any(until in text for text in found)):
            break
    return number, wrong


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("preset", "flag", "stride"),
    [
        ("async_persistent", LOG_FLUSH, 37),
        ("async_persistent", NO_LOG_FLUSH, 31),
        *(pytest.param(preset, flag, 1, marks=pytest.mark.soak) for preset in PRESETS for flag in FLAGS),
    ],
)
def test_power_cut_at_every_operation(
    preset: str, flag: int, stride: int, disk: Disk, tmp_path: Path, record_property: Record
) -> None:
    first = first_of(stride)
    operations, wrong = enumerate_cuts(disk, tmp_path, preset, flag, first=first, stride=stride)
    cuts = len(range(first, operations + 1, stride))
    print(f"{preset}, flag {flag}: {cuts} cuts in {operations} operations, {len(wrong)} violations")
    record_property("power cuts", cuts)
    assert not wrong, "\n".join(wrong)
    assert 30 < operations < MANY - 2


@pytest.mark.parametrize(
    ("preset", "rank", "process", "stride"),
    [
        ("async_persistent", 1, "writer", 25),
        pytest.param("sync", 0, "trainer", 3, marks=pytest.mark.soak),
        pytest.param("async_persistent", 0, "trainer", 3, marks=pytest.mark.soak),
    ],
)
def test_power_cut_with_two_ranks(
    preset: str, rank: int, process: str, stride: int, disk: Disk, tmp_path: Path, record_property: Record
) -> None:
    """Two ranks make two saves; the power goes at every few operations of one of their processes."""
    forker, acks, wrong, cuts = disk.forker, str(tmp_path / "acks"), [], 0
    common: dict[str, Any] = {
        "root": f"{disk.folder}/root",
        "acks": acks,
        "saves": 2,
        "preset": preset,
        "world_size": 2,
    }
    for number in range(first_of(stride), MANY, stride):
        log = str(tmp_path / f"ops{number}")
        failpoint = f"any:rank={rank}:process={process}:nth={number}:action=stop"
        pids = [
            forker.fork("faults.lives:live_on_ranks", rank=each, failpoint=failpoint, log=log, **common)
            for each in range(2)
        ]
        stopped = forker.wait_any(pids, fired=log).stopped is not None
        if stopped:
            disk.cut(NO_LOG_FLUSH, pids)
        else:
            ended = [forker.wait(pid) for pid in pids]
            assert all(each.code == 0 and each.value == {"violations": [], "failed": None} for each in ended), ended
            disk.cut(NO_LOG_FLUSH, [])
        found = forker.run("faults.workloads:check", root=f"{disk.folder}/root", acks=acks, keep=KEEP)
        wrong += [
            f"at {number} ({read_log(f'{log}.fired')}), acknowledged {newest_ack(acks)}: {text}" for text in found
        ]
        if wrong or not stopped:
            break
        cuts += 1
    print(f"{preset}, {process} of rank {rank}: {cuts} cuts, {len(wrong)} violations")
    record_property("power cuts", cuts)
    assert not wrong, "\n".join(wrong)
    assert cuts > 0


NO_FOLDER_SYNC = ";sync_folder:action=skip"
NO_SYNC = f"{NO_FOLDER_SYNC};sync:action=skip"


# Without the manager, because its pointer file, which is synced after the commit, happens to take the renamed folder to
# the disk too.
@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("left_out", "flag", "bare", "first", "stride"),
    [("", NO_LOG_FLUSH, True, 1, 4), (NO_FOLDER_SYNC, NO_LOG_FLUSH, True, 25, 1), (NO_SYNC, LOG_FLUSH, False, 31, 2)],
    ids=["all_syncs", "no_folder_syncs", "no_syncs"],
)
def test_the_rig_sees_what_is_lost_without_syncs(
    left_out: str, flag: int, bare: bool, first: int, stride: int, disk: Disk, tmp_path: Path
) -> None:
    lost = "was acknowledged"  # which shows late in a save
    cuts, wrong = enumerate_cuts(disk, tmp_path, "sync", flag, left_out, bare, first, stride, until=lost)
    print(f"flag {flag}, left out {left_out!r}: {cuts} cuts, {len(wrong)} violations", *wrong[:3], sep="\n")
    if left_out:
        assert any(lost in text for text in wrong), "\n".join(wrong)
    else:
        assert not wrong, "\n".join(wrong)


def leaves(seed: int, length: int) -> Iterator[dict[str, DiskFile | None]]:
    """States that the simulated disk may leave after random operations; each file knows what was written and synced."""
    disk, written = SimulatedDisk(), list[DiskFile]()
    files = SimulatedFiles(disk)
    files.make_folder("/on")
    files.sync_folder("/")
    play(files, "/on", seed, length, created=lambda path: written.append(disk.file(path)))
    whole = {id(file): (bytes(file.data), file.durable) for file in written}
    for choice in range(1500):
        memo = dict[int, object]()
        left = copy.deepcopy(disk, memo)
        left.cut_power(choice)
        known = {id(memo[number]): both for number, both in whole.items() if number in memo}
        state = dict[str, DiskFile | None]()
        for path in left.walk("/on"):
            node = left.find(path)
            if isinstance(node, DiskFile):
                node.data, node.durable = bytearray(known[id(node)][0]), known[id(node)][1]
            state[path.removeprefix("/on/")] = node if isinstance(node, DiskFile) else None
        yield state


def is_that(found: str | None, file: DiskFile | None) -> bool:
    """Whether a real file may be a simulated one: what was synced, and of the rest any bytes or zeros."""
    if found is None or file is None:
        return found is None and file is None
    data, synced = found.encode("latin-1"), len(file.durable)
    letters = {*data[synced:]} <= {0, *file.data[:1]}
    return data[:synced] == file.durable and synced <= len(data) <= file.size and letters


@pytest.mark.parametrize("flag", FLAGS)
def test_what_a_real_disk_leaves_is_what_the_simulated_one_may(
    flag: int, disk: Disk, request: pytest.FixtureRequest, record_property: Record
) -> None:
    wrong = list[str]()
    seeds = range(100 if request.config.getoption("--run-soak") else 10)
    for seed in seeds:
        folder, length = f"{disk.folder}/{seed}", 4 + seed % 12
        done = disk.forker.here("faults.random_files:play_on_disk", folder=folder, seed=seed, length=length)
        disk.cut(flag, [])
        found = disk.forker.here("faults.random_files:tree", folder=folder)
        if not any(
            found.keys() == state.keys() and all(is_that(found[path], state[path]) for path in found)
            for state in leaves(seed, length)
        ):
            wrong.append(
                f"seed {seed}: after {done} there is { {path: text and len(text) for path, text in found.items()} }"
            )
    record_property("real disks compared", len(seeds))
    assert not wrong, "\n".join(wrong)
