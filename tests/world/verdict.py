"""What must hold, whatever has happened: one verdict on a life.

- *Bytes.* What was acknowledged is there, or a newer step that takes its place; each checkpoint that a program finds has
  the bytes of one step of one job on all ranks. What was told to have failed is not there.
- *Ranks.* All ranks of a job go on from the same step, no older than the newest that was acknowledged.
- *Words.* What is refused is refused by a `CheckpointError`; anything else that a rank raises ends the simulation. Where
  only harmless things happen, no call fails.
- *Time.* A call takes no longer than `Script.patience`, and the deadlines of what really failed: who waits for a process that
  has died, or for one that waits for it, waits too long. At the end a job comes to its end.
- *Leftovers.* After the last job nothing is in the folder but checkpoints, the pointer and the owner.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from world.states import differences, said_in
from world.trouble import KINDS

from ckpt_component.core.commit.names import (
    ALIVE_PREFIX,
    MANIFEST,
    MEGATRON,
    OWNER,
    QUARANTINE_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
    StepNames,
    is_owned_token,
)
from ckpt_component.core.commit.protocols import attempts_in, is_quarantined
from ckpt_component.core.commit.scan import Scan, scan_steps
from ckpt_component.core.storage.new_names import NEW_PREFIX
from ckpt_component.errors import CheckpointCorruptError
from ckpt_component.events.event_file import FOLDER as EVENTS
from ckpt_component.loading.reader import Reader

if TYPE_CHECKING:
    from world.world import Told, World

    from ckpt_component.core.storage.storage import Storage

#: For so long a call may take where nothing happens, in seconds.
PATIENCE = 5.0
#: Errors of a rank that has not heard how a save ended: of rank 0, which commits; and of the others, besides.
UNKNOWN_TO_ALL = ("Could not find out",)
UNKNOWN = (*UNKNOWN_TO_ALL, "has not answered", "cannot reach the store", "to decide", "sent no heartbeat")
_OURS = (QUARANTINE_PREFIX, STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX, NEW_PREFIX)
_FIXED = {MEGATRON.pointer, OWNER}
#: Where a run has them.
_MORE = {EVENTS}


@dataclass(frozen=True)
class Folder:
    """A folder of checkpoints.

    Attributes:
        files: its storage, as no process sees it
        root: its path
        kept: which of some steps are kept in it
        acknowledged: steps that must be there, or newer ones, and the job of each, if it is known
        damaged: steps whose bytes were damaged
        has_lost: whether a host was away, or lost what it had: the next start deletes what nobody can use any more
        may_stay: steps that wait for their upload
    """

    files: Storage
    root: str
    kept: Callable[[Collection[int]], set[int]]
    acknowledged: Mapping[int, int | None]
    damaged: Collection[int]
    has_lost: bool = False
    may_stay: Collection[int] = ()


def wrong_in(world: World, *, has_ended: bool) -> Iterator[str]:
    """What is wrong at the end of a life."""
    if not has_ended:
        yield "a call hangs"
    elif not world.is_in_peace and not _is_refused(world):
        yield f"no job came to its end: {[str(rank.error) for rank in world.jobs[-1].ranks]}"
    if all(KINDS[trouble.kind].is_harmless for trouble in world.happened):
        for told in world.told:
            is_damaged = world.has_damage and isinstance(told.error, CheckpointCorruptError)
            if told.error is not None and told.error not in world.refused and not is_damaged:
                yield f"rank {told.rank} failed in its {told.call}: {told.error}"
    yield from _of_ranks(world)
    yield from _of_time(world)
    if world.is_in_peace:
        are_cut_off = world.script.has & {"folders", "uploads"} == {"folders"}  # uploads, which the next run ends
        for folder in world.places[are_cut_off:]:
            yield from _left_behind(world, folder)
        # Longer than a lease has passed, and the last job has snapshots of its own.
        last = world.jobs[-1].ranks
        left = [each.name for each in world.lived_on if each.parent not in {rank.process for rank in last}]
        yield from ([f"{left} live on"] if left else [])


def wrong_in_folder(world: World, folder: Folder) -> Iterator[str]:
    """What is wrong in a folder of the run after a job."""
    files, root = folder.files, folder.root
    found = scan_steps(files, root, MEGATRON)
    committed = [step for step in found.committed if step not in folder.damaged]
    missing = folder.kept({*folder.acknowledged, *committed, *folder.damaged}) - {*committed, *folder.damaged}
    if missing:
        yield f"steps {sorted(missing)} must be kept in {root}, and there are {committed}"
    for step, why in {**found.damaged, **found.torn, **found.unusable}.items():
        if step not in folder.damaged:
            yield f"step {step}: {why}"
    for step in committed:
        yield from _wrong_in_step(world, folder, step)
    for name in files.names(root):
        if MEGATRON.step(name) is None and not name.startswith(_OURS) and name not in _FIXED | _MORE:
            yield f"{name} is nothing of ours"
    pointer = f"{root}/{MEGATRON.pointer}"
    if files.atomic_rename and files.exists(pointer) and not files.read(pointer, 100).isdigit():
        yield f"the pointer says {files.read(pointer, 100)!r}"
    yield from _false_failures(world, folder, found)


class Fence:
    """Who owns the folder: a run that was replaced commits nothing more, once it has done anything else for a save.

    It looks at the owner file after all that, so only what happens between this look and the commit escapes it.

    Args:
        root: the folder
        names: of what is committed there
    """

    def __init__(self, root: str, names: StepNames = MEGATRON) -> None:
        self._folder, self._names = f"{root}/", names
        self._count = 0
        #: When a job has taken the folder, and last changed something of an attempt: numbers of changes.
        self._taken, self._worked = dict[int, int](), dict[int, int]()

    def changed(self, job: int, name: str, path: str) -> Iterator[str]:
        """A job has changed something; yields what is wrong with that."""
        self._count += 1
        if not path.startswith(self._folder):
            return
        first, _, rest = path.removeprefix(self._folder).partition("/")
        if first == OWNER and job not in self._taken:
            self._taken[job] = self._count
        is_step = self._names.step(first) is not None
        if (is_step and rest == MANIFEST) or (is_step and not rest and name == "rename_new"):
            replaced = max((when for other, when in self._taken.items() if other != job), default=0)
            if self._taken.get(job, replaced) < replaced < self._worked.get(job, 0) and name not in (
                "unlink",
                "delete",
            ):
                yield f"job {job} has committed {first}, and another job had replaced it"
        elif (is_step and rest) or first.startswith(STAGING_PREFIX):
            self._worked[job] = self._count


def _wrong_in_step(world: World, folder: Folder, step: int) -> Iterator[str]:
    """What is wrong with a checkpoint."""
    try:
        state = _read(folder, step)
    except CheckpointCorruptError as error:
        yield f"step {step} does not load: {error}"
        return
    yield from (f"step {step}: {text}" for text in _wrong_in_state(world, step, state))
    (job, _), owner = said_in(state), folder.acknowledged.get(step)
    if owner is not None and job != owner:
        yield f"step {step} is that of job {job}, and was acknowledged to job {owner}"


def _read(folder: Folder, step: int) -> Any:
    return Reader(storage_of=lambda _: folder.files).read(os.path.join(folder.root, MEGATRON.folder(step)))[0]


def _wrong_in_state(world: World, step: int, state: Any) -> Iterator[str]:
    job, said = said_in(state)
    if said != world.copies.get(step, step):
        yield f"its state is that of step {said}"
    elif step and not {(job, said, rank) for rank in range(world.ranks)} <= world.begun:
        yield f"not all ranks of job {job} had saved it"
    else:
        found = [*differences(state, world.state(job, said))]
        yield from found if len(found) > world.flips else ()


def _false_failures(world: World, folder: Folder, found: Scan) -> Iterator[str]:
    """Saves that were told to have failed, and are there; unless undoing them failed, too."""
    if world.undoing_may_fail:
        return
    for told in world.told:
        is_there = told.step in {*found.committed} - {*folder.damaged}
        is_told = told.error is not None and not _is_unsure(told)
        if is_there and is_told and said_in(_read(folder, told.step))[0] == told.job:
            yield f"step {told.step} was told to have failed on rank {told.rank}, and is there: {told.error}"


def _is_unsure(told: Told) -> bool:
    return any(text in str(told.error) for text in (UNKNOWN if told.rank else UNKNOWN_TO_ALL))


def _of_ranks(world: World) -> Iterator[str]:
    for job in {each.job for each in world.resumed}:
        there = [each for each in world.resumed if each.job == job]
        if len({each.step for each in there}) > 1:
            yield f"job {job} begins at other steps on other ranks: {[each.step for each in there]}"
        for each in there:
            name = f"rank {each.rank} of job {job} at step {each.step}"
            if (each.step or 0) < each.least:
                yield f"{name}, and step {each.least} was acknowledged"
            yield from (f"{name}: {text}" for text in _wrong_in_state(world, each.step or 0, each.state))


def _of_time(world: World) -> Iterator[str]:
    for told in world.told:
        seconds = told.until - told.since
        if seconds > world.script.patience:
            seconds -= _covered(world.excused(told), told.since, told.until)
        if seconds > world.script.patience:
            yield f"rank {told.rank} of job {told.job} waited {seconds:.1f} s too long in its {told.call}: {told.error}"
    for each in world.waited:
        if each.process is not each.rank.process:  # where all ranks have died, nobody is left to wait for
            over = max(rank.process.ended_at for rank in each.rank.job.ranks)
            since = max(each.since, over)
            seconds = each.until - since - _covered(world.excuses, since, each.until)
            if seconds > PATIENCE:
                yield f"{each.process.name} waited {seconds:.1f} s too long for {each.whom}, and its job was over"


def _covered(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """How much of a time lies in any of these."""
    total = 0.0
    for start, end in sorted(spans):
        start, end = max(start, since), min(end, until)
        total += max(end - start, 0.0)
        since = max(since, end)
    return total


def _is_refused(world: World) -> bool:
    """Whether nothing that is there can be used, and all ranks say so."""
    errors, is_lost = [rank.error for rank in world.jobs[-1].ranks], bool(world.damaged)
    if "folders" in world.script.has:
        is_lost = not world.newest(world.simulation.now)
    return is_lost and all(isinstance(error, CheckpointCorruptError) for error in errors)


def _left_behind(world: World, folder: Folder) -> Iterator[str]:
    files, root = folder.files, folder.root
    scan = scan_steps(files, root, MEGATRON)
    found, names = scan.committed, {*files.names(root)}
    expected = {MEGATRON.folder(step) for step in found} | (_FIXED if world.script.has_run else set())
    # What is left of a newer step may become whole again, as its host comes back.
    names -= {MEGATRON.folder(step) for step in scan.parts if step > min(found, default=0)}
    names -= {MEGATRON.folder(step) for step in {**scan.unfinished, **scan.foreign} if folder.has_lost}
    names -= {MEGATRON.folder(step) for step in scan.unfinished if _is_of_lost_host(world, folder, step)}
    if not world.script.has_run:  # what was cut off stays there until `ckpt gc`, or the next save of that path
        names = {name for name in names if not name.startswith(_OURS)}
    left = {name for name in names - expected - _MORE if not _is_set_aside(folder, name)}
    if left:
        yield f"left behind in {root}: {sorted(left)}"
    if expected - names:
        yield f"missing in {root}: {sorted(expected - names)}"
    elif world.script.has_run and files.read(f"{root}/{MEGATRON.pointer}", 100) != str(found[-1]).encode():
        yield "the pointer does not say the newest step"
    for step in found:
        path = f"{root}/{MEGATRON.folder(step)}"
        more = [name for name in attempts_in(files, path) if not is_quarantined(files, f"{path}/{name}")]
        if len(more) > 1 and not folder.has_lost and world.script.has_run:
            yield f"left behind in {path}: {more}"
    if {*found} - {*folder.may_stay} != (folder.kept(found) | ({*folder.damaged} & {*found})) - {*folder.may_stay}:
        yield f"too many are kept in {root}: {found}"


def _is_of_lost_host(world: World, folder: Folder, step: int) -> bool:
    """Whether a person was at work there, on a host that is gone: no other host can tell that it is over."""
    lost = {hashlib.sha256(host.encode()).hexdigest()[:8] for host in world.simulation.network.lost}
    tokens = attempts_in(folder.files, f"{folder.root}/{MEGATRON.folder(step)}")
    return any(token[:8] in lost and not is_owned_token(token) for token in tokens)


def _is_set_aside(folder: Folder, name: str) -> bool:
    """Whether it holds what was damaged, or what followed when a run went back: that is kept; or nothing at all."""
    path = f"{folder.root}/{name}"
    if folder.has_lost and not [*folder.files.files_below(path)]:
        return True  # an empty folder of a host that was away
    return name.startswith(QUARANTINE_PREFIX) or any(
        is_quarantined(folder.files, f"{path}/{each}") for each in attempts_in(folder.files, path)
    )
