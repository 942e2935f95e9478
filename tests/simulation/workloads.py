"""What runs do: each of these meets every fault at every operation."""

from __future__ import annotations

from collections.abc import Collection

from ckpt_component import build_checkpointer
from ckpt_component.core.commit.awaited_parts import wait_for_parts
from ckpt_component.core.commit.cleanup import Unfinished, discard
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.copying import Continued, copy_checkpoint, copy_part
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.host_parts import part_of
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.part_notes import Beat, PartNote, note_path, write_note
from ckpt_component.testing import Disk, DiskFile, Fault, PowerCut, SimulatedObjects

from .world import FROZEN, ROOT, Run, Workload, storage_on

ELSEWHERE = "/runs/elsewhere"


def saves(*steps: int, root: str = ROOT):  # type: ignore[no-untyped-def]
    def act(run: Run) -> None:
        with run.manager(root=root) as manager:
            manager.restore(run.state(0))
            run.save(manager, *steps)

    return act


def save_the_worse(run: Run) -> None:
    with run.manager() as manager:
        manager.restore(run.state(0))
        run.save(manager, 2, loss=0.9)


def save_the_best(run: Run) -> None:
    with run.manager() as manager:
        run.save(manager, 1, loss=0.5)


def save_a_better(run: Run) -> None:
    with run.manager() as manager:
        manager.restore(run.state(0))
        run.save(manager, 2, loss=0.1)


def save_and_damage(run: Run) -> None:
    saves(1, 2)(run)
    damage(run.files.disk, run.path_of(2))
    run.acknowledged.remove(2)


def largest_file(disk: Disk | SimulatedObjects, folder: str) -> str:
    """The largest file with tensors."""
    return max((path for path in disk.walk(folder) if path.endswith(".distcp")), key=lambda path: disk.file(path).size)


def damage(disk: Disk | SimulatedObjects, folder: str) -> None:
    """Flip a bit of a tensor."""
    file: DiskFile = disk.file(largest_file(disk, folder))
    file.data[file.size * 37 // 100] ^= 1  # inside of a tensor, also if a few have the same size
    file.sync()


def rewind(run: Run) -> None:
    with run.manager(f"checkpoint.resume={run.path_of(1)}", "checkpoint.rewind=true") as manager:
        assert manager.restore(run.state(0)) == 1
        run.save(manager, 2)


def save_elsewhere(run: Run) -> None:
    saves(1, 2, root=ELSEWHERE)(run)
    run.acknowledged.clear()


def copy(run: Run) -> None:
    source, files = run.path_of(2, ELSEWHERE), run.files
    manifest = read_manifest(files, source)
    assert manifest is not None
    copy_checkpoint(files, source, manifest, files, run.path_of(2), lambda staging, kept: None)
    run.acknowledged.append(2)


def copy_from_hosts(run: Run) -> None:
    """Two hosts copy one checkpoint, each its own files; after a failure they go on."""
    source, files, ownership = run.path_of(2, ELSEWHERE), run.files, FencingToken(run.files, ROOT)
    found = read_manifest(files, source)
    assert found is not None
    names = [entry["name"] for entry in found["files"]]
    manifest = {**found, "hosts": {"one": names[::2], "two": names[1::2]}}
    attempt = new_attempt(files, run.path_of(2), manifest["attempt"])

    def others(staging: str, kept: Collection[str]) -> None:
        note = note_path(attempt, manifest, "two")
        with Beat(attempt, note) as beat:
            copy_part(files, source, part_of(manifest, "two"), attempt, lambda nbytes: beat.moved())
        write_note(files, note, PartNote(attempt=attempt.token))
        wait_for_parts(attempt, manifest, "one", 0.0, lambda part: None)

    continued = Continued(attempt.token, ownership, lambda nbytes: None, host="one")
    for tries_left in (1, 0):
        try:
            copy_checkpoint(files, source, manifest, files, attempt.target, others, continued=continued)
            run.acknowledged.append(2)
            return
        except OSError:
            if not tries_left:
                raise


def save_by_path(run: Run) -> None:
    with build_checkpointer(run.settings, storage_of=lambda path: run.files) as checkpointer:
        checkpointer.save(run.state(1), run.path_of(1))
        run.acknowledged.append(1)


def delete(run: Run) -> None:
    run.acknowledged.remove(1)
    discard(run.files, run.path_of(1))


def leave_debris(run: Run) -> None:
    """Two saves are cut off, each at another place."""
    saves(1)(run)
    disk = run.files.disk
    for number in (12, 30):
        off = storage_on(disk, "rename" if run.files.atomic_rename else "manifest", {number: Fault("cut")}, locks=False)
        try:
            saves(2)(Run(off, run.overrides, keep=run.keep))
        except PowerCut:
            disk.cut_power(number)


def collect(run: Run) -> None:
    Unfinished(run.files, ROOT, MEGATRON).sweep()


NO_POLICY = ("checkpoint.save.every_steps=null",)
WORKLOADS = [
    Workload("first_save", saves(1), overrides=NO_POLICY),
    Workload("by_path", save_by_path, overrides=NO_POLICY),
    Workload("retention", saves(2), saves(1), NO_POLICY),
    Workload("training_goes_on", saves(2, 3), saves(1), (*NO_POLICY, "checkpoint.on_error=warn"), keep=2),
    Workload("shared", saves(3, 4), saves(1, 2), (*NO_POLICY, FROZEN), keep=2),
    Workload("best", save_the_worse, save_the_best, (*NO_POLICY, "checkpoint.keep.best.metric=loss"), holds=(1,)),
    Workload(
        "better", save_a_better, save_the_best, (*NO_POLICY, "checkpoint.keep.best.metric=loss"), holds=(1,), instead=2
    ),
    Workload("damaged", saves(3), save_and_damage, NO_POLICY, keep=2, damaged=2),
    Workload("rewind", rewind, saves(1, 2, 3), NO_POLICY, keep=3, goes_back=True),
    Workload("copy", copy, save_elsewhere, NO_POLICY, keep=2),
    Workload("copy_from_hosts", copy_from_hosts, save_elsewhere, NO_POLICY, keep=2),
    Workload("delete", delete, saves(1, 2), NO_POLICY, keep=2),
    Workload("collect", collect, leave_debris, NO_POLICY),
]
