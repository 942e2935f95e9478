"""What the jobs of a world do: training scripts, and what people do beside them.

The first job of a script does what comes first; troubles may come in any of them. What a script gives up, or damages,
it says to the world, so that the verdict knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from world.commands import copy_step, remove, sweep
from world.host_disks import FINISH, LOCAL
from world.states import loss_of
from world.storages import KINDS
from world.times import LONG
from world.wander_scripts import JOBS, wander, wander_frozen
from world.weight_scripts import PUBLISHES, train_and_publish

from ckpt_component import CheckpointListener, SaveReport
from ckpt_component.core.commit.commit import begin, new_attempt
from ckpt_component.core.commit.copying import Continued, copy_checkpoint, copy_part
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import part_of, read_manifest
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.hosts.host_uploads import (
    PartNote,
    at_work,
    call_for_parts,
    is_note,
    note_path,
    wait_for_hosts,
    write_note,
)

if TYPE_CHECKING:
    from world.world import Rank, World


@dataclass(frozen=True)
class Script:
    """See the top of this file.

    Attributes:
        run: what each rank does
        preset: of the config
        overrides: of it
        keep: how many checkpoints stay
        keeps_every: and each so-manieth step; 0: none
        jobs: how many jobs follow each other, at least, before the last one
        most_jobs: the launcher starts no more than these
        between: what happens between the first two
        has_base: whether the state has weights that do not change
        keeps_best: whether the best checkpoint is kept beside the newest
        has_run: whether managers are there, which have a pointer and own the folder
        hosts: of the ranks of the lives that are enumerated: a letter each; none: `test_histories` has this one
        storages: where the folder of the run is in these
        has: what there is besides the folder: `memory`, where each step is kept, and only every second one is saved;
            `peers`, hosts that have copies of what is in the memory of others; `weights`, published ones; `folders`, a
            disk of each host in front of the folder; `uploads` from there
        patience: for so long a call may take where nothing happens, in seconds
        wrong: what is wrong after a job, besides what `verdict` finds
    """

    run: Callable[[Rank], None]
    preset: str = "sync"
    overrides: tuple[str, ...] = ()
    keep: int = 1
    keeps_every: int = 0
    jobs: int = 2
    most_jobs: int = 6
    between: Callable[[World], None] = lambda world: None
    has_base: bool = False
    keeps_best: bool = False
    has_run: bool = True
    hosts: tuple[str, ...] = ("a", "ab")
    storages: tuple[str, ...] = KINDS
    has: frozenset[str] = frozenset()
    patience: float = 5.0
    wrong: Callable[[World], Iterable[str]] = lambda world: ()

    def kept(self, steps: Collection[int]) -> set[int]:
        """Which of these steps are kept."""
        best = sorted(steps, key=lambda step: (loss_of(step), step))[: self.keeps_best]
        every = [step for step in steps if self.keeps_every and step % self.keeps_every == 0]
        return {*sorted(steps)[-self.keep :], *best, *every}


def train(rank: Rank) -> None:
    """Go on from where the last job was, and save some steps."""
    with rank.manager() as manager:
        last = rank.restore(manager)
        for step in range(last + 1, last + (4 if rank.job.number == 1 else 3)):
            rank.sleep(1.0)
            rank.save(manager, step, metrics={"loss": loss_of(step)})


def go_back(rank: Rank) -> None:
    """The second job gives up all steps but the first."""
    path = rank.path_of(1)
    if rank.job.number != 2 or 1 not in rank.world.committed:
        train(rank)
        return
    rank.world.gives_up([step for _, step in rank.world.saved if step > 1])
    with rank.manager(f"checkpoint.resume={path}", "checkpoint.rewind=true") as manager:
        assert rank.restore(manager, least=0) == 1, "it goes back to another step"
        rank.save(manager, 2, metrics={"loss": loss_of(2)})


def save_by_path(rank: Rank) -> None:
    """Save without a manager, to the first free path."""
    step = max(rank.world.committed, default=0) + 1
    with rank.checkpointer() as checkpointer:
        rank.save_to(checkpointer, step)


def delete(rank: Rank) -> None:
    """The second job is a person who deletes a checkpoint."""
    if rank.job.number != 2:
        train(rank)
    elif rank.number == 0:
        remove(rank, 2)


def collect(rank: Rank) -> None:
    """The second job is a person who deletes what dead runs have left."""
    if rank.job.number != 2:
        train(rank)
    elif rank.number == 0:
        sweep(rank)


def copy(rank: Rank) -> None:
    """The second job is a person who copies the newest checkpoint."""
    if rank.job.number != 2:
        train(rank)
    elif rank.number == 0 and rank.world.committed:
        step = rank.world.committed[-1]
        copy_step(rank, step, step + 10)


def copy_from_hosts(rank: Rank) -> None:
    """The same where the files are on two hosts: each copies its own, and one commits; after a failure they go on."""
    world, files = rank.world, rank.storage("")
    if rank.job.number != 2:
        train(rank)
    elif rank.number == 0 and world.committed:
        step = world.committed[-1]
        source, target = rank.path_of(step), rank.path_of(step + 10)
        world.copies[step + 10] = step
        with rank.call("command", step + 10):
            found, ownership = read_manifest(files, source), FencingToken(files, world.root)
            assert found is not None
            names = [entry["name"] for entry in found["files"]]
            manifest = {**found, "hosts": {"one": names[::2], "two": names[1::2]}}
            attempt = new_attempt(files, target, manifest["attempt"])

            def others(staging: str, kept: Collection[str]) -> None:
                note = note_path(attempt, manifest, "two")
                with at_work(attempt, note, lambda nbytes: None) as pace:
                    copy_part(files, source, part_of(manifest, "two"), attempt, pace)
                write_note(files, note, PartNote(attempt=attempt.token))
                wait_for_hosts(attempt, manifest, "one", 0.0)

            continued = Continued(
                attempt.token,
                ownership,
                lambda nbytes: None,
                host="one",
                begun=lambda attempt: call_for_parts(attempt, manifest),
                stays=is_note,
            )
            for tries_left in (1, 0):
                try:
                    copy_checkpoint(files, source, manifest, files, target, others, continued=continued)
                    break
                except OSError:
                    if not tries_left:
                        raise
        for job in [job for job, saved in world.saved if saved == step][-1:]:  # else nobody was told that it is saved
            world.acknowledged(job, step + 10)


def leave_debris(world: World) -> None:
    """Two saves are cut off, some time ago."""
    dead, launcher = world.simulation.process("a dead run", world.hosts[0]), world.simulation.current.process
    files = world.storage(dead, world.root)

    def save() -> None:
        for step in (7, 8):
            attempt = new_attempt(files, f"{world.root}/{MEGATRON.folder(step)}", new_token(files.outside))
            begin(attempt)
            files.write_new(f"{attempt.staging}/data", b"half of it")
        dead.kill()

    dead.start(save)
    launcher.outside.sleep(LONG)


def flip(world: World) -> None:
    """A bit of the newest checkpoint has changed."""
    world.flip()


def train_in_memory(rank: Rank) -> None:
    """Go on from where the last job was; each step is kept in memory, and each second one is saved, too."""
    with rank.manager() as manager:
        last = rank.restore(manager)
        for step in range(last + 1, last + (5 if rank.job.number == 1 else 4)):
            rank.sleep(1.0)
            rank.keep(manager, step)
        rank.waits_for_its_end()  # a manager that is closed leaves nothing in memory


class Arrivals(CheckpointListener):
    """Tells the world which snapshots have copies at peers."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def on_at_peers(self, report: SaveReport) -> None:
        job = self._rank.job
        job.world.memory.is_at_peers(job.number, report.step or 0, job.hosts)


def train_with_peers(rank: Rank) -> None:
    """The same with copies at peers. What the first job has last is in memory alone."""
    with rank.manager() as manager:
        manager.add_listener(Arrivals(rank))
        last = rank.restore(manager)
        for step in range(last + 1, last + (6 if rank.job.number == 1 else 4)):
            rank.sleep(1.0)
            rank.keep(manager, step)
        rank.waits_for_its_end()


def wrong_on_disks(world: World) -> Iterable[str]:
    """What is wrong on the disks of hosts."""
    return world.local.wrong()


#: One rank, two on one host and on two, three and four.
MANY = ("a", "aa", "ab", "aab", "abc", "abba")
#: A disk of each host, from where steps are uploaded.
_LOCAL = (f"checkpoint.local.dir={LOCAL}",)
SCRIPTS: Mapping[str, Script] = {
    "train": Script(train, hosts=MANY),
    "goes_on": Script(train, overrides=("checkpoint.on_error=warn",), keep=2, hosts=("a", "ab", "abc")),
    "tries_again": Script(train, overrides=("checkpoint.on_error=retry", "checkpoint.retry.backoff_seconds=1")),
    "shared": Script(train, overrides=("checkpoint.reuse.frozen=[shared.base]",), keep=2, has_base=True),
    "best": Script(train, overrides=("checkpoint.keep.best.metric=loss",), keeps_best=True),
    "damaged": Script(train, keep=2, between=flip),
    "rewind": Script(go_back, keep=3),
    "by_path": Script(save_by_path, keep=9, has_run=False),
    "delete": Script(delete, keep=3),
    "collect": Script(collect, keep=3, between=leave_debris),
    "copy": Script(copy, keep=4),
    "copy_from_hosts": Script(copy_from_hosts, keep=4),
    "wander": Script(wander, keep=2, jobs=JOBS, most_jobs=9, hosts=()),
    "wander_best": Script(
        wander,
        overrides=("checkpoint.keep.best.metric=loss", "checkpoint.keep.every_steps=4"),
        keeps_best=True,
        keeps_every=4,
        jobs=JOBS,
        most_jobs=9,
        hosts=(),
    ),
    "wander_frozen": Script(wander_frozen, keep=2, jobs=JOBS, most_jobs=9, hosts=(), has_base=True),
    "memory": Script(
        train_in_memory,
        preset="async_persistent",
        overrides=(
            "checkpoint/recovery=host",
            "checkpoint.recovery.every_steps=1",
            "checkpoint.save.every_steps=2",
            "checkpoint.overlap=wait",
        ),
        keep=2,
        hosts=("a", "aa", "aaa", "aaaa"),
        has=frozenset({"memory"}),
    ),
    "weights": Script(
        train_and_publish,
        overrides=PUBLISHES,
        keep=2,
        has=frozenset({"weights"}),
        wrong=lambda world: world.weights.wrong(),
    ),
    "peers": Script(
        train_with_peers,
        preset="async_persistent",
        overrides=(
            "checkpoint/recovery=peers",
            "checkpoint.recovery.every_steps=1",
            "checkpoint.save.every_steps=2",
            "checkpoint.overlap=wait",
        ),
        keep=2,
        hosts=("ab", "abc", "abba"),
        storages=("disk",),
        has=frozenset({"memory", "peers"}),
    ),
    "folders": Script(
        train,
        # Few steps are uploaded, and none when a run has ended: what is in the local folders alone counts.
        overrides=(*_LOCAL, "checkpoint.upload.every_steps=3", "checkpoint.upload.finish_seconds=0.1"),
        keep=2,
        hosts=("a", "ab", "aab", "abc"),
        storages=("disk",),
        has=frozenset({"folders"}),
        patience=10.0,  # a start looks at many files on all hosts
        wrong=wrong_on_disks,
    ),
    "uploads": Script(
        train,
        overrides=(*_LOCAL, f"checkpoint.upload.finish_seconds={FINISH:g}"),
        keep=2,
        hosts=("ab", "aab"),
        storages=("disk", "bucket"),
        has=frozenset({"folders", "uploads"}),
        patience=10.0,
        wrong=wrong_on_disks,
    ),
}
