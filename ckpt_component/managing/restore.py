"""Restore a run: rank 0 scans for committed steps; all ranks load the same step, and fall back together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..checkpointer import Checkpointer
from ..core.commit.cleanup import Unfinished, quarantine, wait_for_writers
from ..core.commit.scan import Scan, both, is_deleted, repair_pointer
from ..core.storage.locate import same_folder
from ..core.storage.space import amount
from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    MissingKeysError,
)
from ..loading.object_state import new_optimizer_states
from ..state.flatten import not_a_state
from .lookup import candidates_of
from .run_folder import RunFolder

if TYPE_CHECKING:
    from .run_context import (
        RunContext,
        SnapshotSource,  # which runs without an option do not load
    )

logger = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """A checkpoint that may be loaded; also as a list in JSON.

    Attributes:
        step: its step
        path: its path
        source: which of the sources has it; None: it is in a folder
        options: of its load, see `RunContext.load_options`
    """

    step: int
    path: str
    source: int | None = None
    options: Mapping[str, Any] = {}


class Found(NamedTuple):
    """What the leading rank found, as JSON values for all ranks.

    Attributes:
        candidates: the checkpoints to try, best first
        committed: the committed steps of each folder of the run
        suspects: damaged steps, to quarantine, with their paths
        occupied: all steps that a save would collide with
        told: what each source tells all ranks of what it has; None: it has nothing
    """

    candidates: Sequence[Candidate]
    committed: Sequence[Sequence[int]]
    suspects: Sequence[Candidate]
    occupied: Sequence[int]
    told: Sequence[Any]


class Restorer:
    """Finds and loads the checkpoint that a run begins with.

    Args:
        checkpointer: loads the checkpoint
        folder: the run's folder, which refuses or retires the steps that follow
        saves: whether the save policy makes any saves
        sources: what may have snapshots of the run, the nearest first

    Attributes:
        path: the checkpoint that was loaded, or the one that was tried last; None: there was none
        is_here: whether the one that was loaded last is in a folder of this run, or came from one of the sources
        is_durable: whether the step that was loaded last is in a folder of this run
    """

    def __init__(
        self, checkpointer: Checkpointer, folder: RunFolder, saves: bool, sources: Sequence[SnapshotSource] = ()
    ) -> None:
        self._checkpointer = checkpointer
        self._folder = folder
        self._run = folder.run
        self._policy = folder.resume
        self._saves = saves
        self._sources = sources
        self.path: str | None = None
        self.is_here = self.is_durable = False

    def load(
        self, state: dict[str, Any], strict: bool, allow_dtype_cast: bool, options: Mapping[str, Any] | None = None
    ) -> int | None:
        """Load the best undamaged step; see `CheckpointManager.restore`. Returns the step, or None.

        Damaged checkpoints are quarantined only after an older checkpoint has been loaded, or if there never was one:
        until then they may be all there is. Steps that follow are retired as late.

        Args:
            state: filled in place
            strict: raise if the checkpoint lacks keys of the state
            allow_dtype_cast: let the state's tensors take values of another dtype
            options: `rename`, `prefix` and `ignore`, instead of those of the policy, if there are any
        """
        if not isinstance(state, Mapping | torch.nn.Module):  # also where there is no checkpoint to load yet
            raise not_a_state(state)
        ranks, timeouts = self._run.ranks, self._run.timeouts
        deadline = ranks.outside.now() + timeouts.stage + timeouts.close
        manifests: dict[str, Mapping[str, Any]] = {}
        offer, look = [source.offer() for source in self._sources], partial(self._look, manifests)
        found = Found(**ranks.meet("restore", offer, lambda offers: look(offers)._asdict(), deadline))
        for number, told in enumerate(found.told):
            self._sources[number].join(told)
        tag = f"restore/{ranks.meetings['restore']}"
        options, new = options or self._policy.load_options, new_optimizer_states(state)
        unused = "" if self._policy.is_exact or not found.candidates else " and ".join(options)
        if unused:
            options = {}
            if ranks.is_leader:
                text = "%s is for a checkpoint that checkpoint.resume names by step or path; this one loads as it is"
                logger.info(text, unused)
        load = partial(
            self._checkpointer.load,
            state_dict=state,
            strict=strict,
            resuming=True,
            allow_dtype_cast=allow_dtype_cast,
            # What the leading rank has found may not be seen elsewhere yet.
            visible=None if ranks.is_leader else timeouts.visible,
            **options,
        )
        try:
            loaded, damaged = self._load_first([Candidate(*each) for each in found.candidates], manifests, tag, load)
        except CheckpointLoadError as error:
            if isinstance(error, MissingKeysError) and error.advice and not self._policy.is_exact:
                text = f"{error} Here it also needs checkpoint.resume={found.candidates[0][0]}."
                raise MissingKeysError(text, error.keys) from None
            if unused and ranks.is_leader and not isinstance(error, CheckpointCorruptError):
                logger.warning("%s was not used; to use it, add checkpoint.resume=%d", unused, found.candidates[0][0])
            raise
        step, source = (None, None) if loaded is None else (loaded.step, loaded.source)
        lost = [key for key, value in new.items() if value["state"]]
        if lost and ranks.is_leader:
            text = "%s in the state: a state_dict() was filled, and its optimizer was not; pass the optimizer itself"
            logger.warning(text, " and ".join(map(repr, lost)))
        never = self._policy.choice == "never"
        if self._policy.rewind or not never:
            suspects = [*(Candidate(*each) for each in found.suspects), *damaged]
            tidy = partial(self._tidy, step, suspects, found)
            seconds = timeouts.stage + (timeouts.write if suspects else 0)  # to read them once more
            ranks.run_on_leader(f"{tag}/tidy", tidy, ranks.outside.now() + seconds)
        if ranks.is_leader and step is None:
            why = "checkpoint.resume=never" if never else f"no checkpoint in {self._run.roots}"
            logger.info("%s: starting from scratch", why)
        self.is_durable = step is not None and self._is_here(step)
        self.is_here = self.is_durable or source is not None
        if source is not None:
            self.is_durable = any(step in steps for steps in found.committed)
        for number, other in enumerate(self._sources):
            if number != source:
                other.let_go()
        # Steps of a run that began elsewhere may start below those that the folder holds.
        self._folder.settled = self._saves and (step is None or self.is_here)
        if self.path is not None:
            self._folder.resumed_from(self.path)
        if step is not None and self._checkpointer.last_load is not None:
            self._run.events.restored(replace(self._checkpointer.last_load, step=step))
        return step

    def _is_here(self, step: int) -> bool:
        """Whether `path` is the checkpoint of this step in a folder of the run."""
        places = [each.path_of(step) for each in (self._run, self._run.remote) if each is not None]
        path = self.path or ""
        return path in places or any(same_folder(path, place) for place in places)

    def delete_old(self, step: int) -> None:
        """On the leading rank: delete what `keep` no longer keeps beside the step that the run began with."""
        self._folder.after_restore(step)

    def begin(self, step: int) -> bool:
        """Begin after a step that the program has loaded by itself; see `CheckpointManager.begin_at`.

        Args:
            step: the step; 0: from scratch

        Returns:
            Whether the folder has a committed checkpoint of this step.
        """
        timeouts = self._run.timeouts
        deadline = self._run.ranks.outside.now() + timeouts.stage + timeouts.close + timeouts.write
        here: bool = self._run.ranks.meet("begin_at", None, lambda _: self._check_start(step), deadline)
        self._folder.settled = True
        if here:
            self._folder.resumed_from(self._run.path_of(step))
        return here

    def _check_start(self, step: int) -> bool:
        """On the leading rank: clean up, verify the checkpoint of a step, and refuse or retire those that follow."""
        try:
            local, remote = self._run.scan(self._clean_up()), self._run.scan_remote()
        except OSError as error:
            raise _unlisted(self._run, error) from error
        scan = local if remote is None else both(local, remote)
        place = self._run if step in local.occupied else self._run.remote or self._run
        path = place.path_of(step)
        bad = {**scan.damaged, **scan.torn}
        if step in scan.committed and self._checkpointer.verifies:
            started = perf_counter()
            try:
                self._checkpointer.verify(path)
            except CheckpointUnreadableError:
                raise
            except CheckpointCorruptError as error:
                bad[step] = str(error)
            else:
                logger.info("step %d: checksums verified in %.2f s", step, perf_counter() - started)
        if step in bad:
            older = [other for other in scan.committed if other < step]
            advice = "resume from another checkpoint"
            if older:
                path = quarantine(self._run.storage_of(path), path)
                self._run.note("quarantine", step, path)
                advice = f"it is now kept as {path}, and the next start resumes from step {older[-1]}"
            raise CheckpointCorruptError(f"The checkpoint of step {step} is damaged; {advice}. {bad[step]}")
        self._folder.begin_after(step, {**scan.occupied, **scan.foreign})
        is_here = step in scan.committed
        self._folder.purge.found(local)
        return is_here

    def _load_first(
        self,
        candidates: Sequence[Candidate],
        manifests: Mapping[str, Mapping[str, Any]],
        tag: str,
        load: Callable[..., Any],
    ) -> tuple[Candidate | None, list[Candidate]]:
        """Load the first undamaged candidate; returns it, and the damaged ones before it."""
        self.path, damaged = None, list[Candidate]()
        for number, candidate in enumerate(candidates):
            started, (step, path, source_number, options) = perf_counter(), candidate
            self.path, source = path, None if source_number is None else self._sources[source_number]
            try:
                load(path, tag=f"{tag}/{number}", manifest=manifests.get(path), **options)
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                is_last = number + 1 == len(candidates)
                if is_last and source is not None:
                    raise type(error)(f"{error} Nothing else is left; {source.advice}.") from error
                if is_last or (source is None and not isinstance(error, CheckpointCorruptError)):
                    raise
                if source is None or self._run.ranks.is_leader:
                    what = f"step {step}" if source is None else f"step {step} in {source.name}"
                    logger.error("%s cannot be used, trying step %d: %s", what, candidates[number + 1].step, error)
                # An unreadable checkpoint may be intact: the disk or the mount may be at fault.
                if not isinstance(error, CheckpointUnreadableError):
                    damaged.append(candidate)
                continue
            loaded = self._checkpointer.last_load
            if self._run.ranks.is_leader and loaded is not None:
                verified = "not verified: it has no checksums"
                if loaded.verified:
                    verified = "checksums verified"
                elif not self._checkpointer.verifies:
                    verified = "not verified (checkpoint.verify=off)"
                seconds = perf_counter() - started
                text = "restored step %d from %s: %s in %.2f s, %s"
                place = path if source is None else source.place(loaded)
                logger.info(text, step, place, amount(loaded.bytes), seconds, verified)
            return candidate, damaged
        return None, damaged

    def _look(self, manifests: dict[str, Mapping[str, Any]], offers: Sequence[Sequence[Any]]) -> Found:
        """On the leading rank: clean up and scan the folder.

        Args:
            manifests: takes those of committed checkpoints, by path
            offers: what the sources of each rank have offered

        Raises:
            CheckpointUnreadableError: the folder cannot be listed, or the permanent one, which alone can have what
                `resume` asks for
        """
        run = self._run
        nearer = [source.look([offer[number] for offer in offers]) for number, source in enumerate(self._sources)]
        try:
            # What the writer of a dead run is still finishing is not newer than the snapshot that it was made of.
            local, remote = run.scan(self._clean_up(waits=not any(nearer))), run.scan_remote()
        except OSError as error:
            raise _unlisted(run, error) from error
        folders = [(run, local)]
        if run.remote is not None:
            if remote is None:
                self._refuse_unknown(local, run.remote.root)
            folders.append((run.remote, remote or Scan()))
        scan = local if remote is None else both(local, remote)
        durable, occupied = [list(has.committed) for _, has in folders], sorted(scan.occupied)
        places: list[tuple[int | None, RunContext, Scan]] = [
            (number, *found) for number, source in enumerate(self._sources) if (found := source.found(scan)) is not None
        ]
        for _, _, has in reversed(places):
            scan = both(has, scan)
        places += [(None, at, has) for at, has in folders]
        known = dict[str, Candidate]()
        for number, at, has in places:
            for step in has.committed:
                path, manifest = at.path_of(step), has.manifests[step]
                manifests[path] = manifest
                known[path] = Candidate(step, path, number, at.load_options(manifest))
        bad = {**scan.damaged, **scan.torn, **scan.unusable}
        for step, why in sorted(bad.items()):
            logger.error("step %d is not a usable checkpoint: %s", step, why)
        for step, why in sorted(scan.parts.items()):
            logger.warning("step %d is left alone: %s", step, why)
        for why in scan.unfinished.values():
            logger.warning("%s; it is not a checkpoint and is left alone", why)
        for why in scan.foreign.values():
            logger.warning("%s, so it is not considered a checkpoint of this run and is left alone", why)
        self._run.warned.update(bad.values(), scan.parts.values(), scan.foreign.values())
        # An empty local folder is not what errors are about.
        try:
            chosen = candidates_of(run if local.occupied or local.parts else run.remote or run, self._policy, scan)
        except CheckpointError:  # one that is not found is an OSError, too
            raise
        except OSError as error:
            raise _unlisted(run, error) from error
        candidates = [known.get(path, Candidate(step, path)) for step, path in chosen]
        if self._policy.path is None:  # from the nearest place first
            paths = [at.path_of(step) for step, _ in chosen for _, at, _ in places]
            candidates = [known[path] for path in paths if path in known]
        if self._saves:
            self._folder.refuse_following(candidates[0].step if candidates else None, occupied)
        suspects = [Candidate(step, at.path_of(step)) for at, has in folders for step in {**has.damaged, **has.torn}]
        self._folder.purge.found(local)
        told = [source.told() for source in self._sources]
        return Found(candidates, durable, suspects if self._policy.searches else [], occupied, told)

    def _refuse_unknown(self, local: Scan, remote: str) -> None:
        """The permanent folder cannot be listed: refuse to begin if the local one has nothing to begin with.

        Raises:
            CheckpointUnreadableError: it is so
        """
        choice = self._policy.choice
        here = choice in local.committed if isinstance(choice, int) else bool(local.committed)
        if choice != "never" and self._policy.path is None and not here:
            raise CheckpointUnreadableError(
                f"checkpoint.resume={choice}, and {self._run.root} has no such checkpoint; {remote} may have one, "
                "but cannot be listed now. To start from scratch nevertheless, type checkpoint.resume=never."
            )

    def _tidy(self, restored: int | None, suspects: Sequence[Candidate], found: Found) -> None:
        """On the leading rank: retire the steps that follow, quarantine damaged ones, and repair the pointer."""
        moved = self._folder.retire_following(restored, found.occupied)
        for source in self._sources if self._policy.rewind else ():
            source.drop_after(restored)
        for step, path, number, _ in suspects:
            if number is not None:
                self._sources[number].drop(path)
                continue
            if step in moved:
                continue
            if self._is_whole(path):
                logger.warning("%s was found damaged, and is whole now that it was read again: it stays", path)
                continue
            storage = self._run.storage_of(path)
            try:
                if is_deleted(storage, path, step):
                    logger.warning("%s was found damaged because it was being deleted: what is left of it stays", path)
                    moved.append(step)
                    continue
                target = quarantine(storage, path)
            except OSError as error:
                logger.error("%s is damaged and could not be quarantined: %s", path, error)
                if path == self._run.path_of(step):
                    self._folder.purge.leave_damaged(step)
                continue
            logger.error(
                "%s is damaged; it is kept as %s, which nothing uses or deletes "
                "(docs/failures.md#a-damaged-checkpoint)",
                path,
                target,
            )
            self._run.note("quarantine", step, target)
            moved.append(step)
        for at, steps in zip(filter(None, (self._run, self._run.remote)), found.committed, strict=True):
            repair_pointer(at.fs, at.root, at.names, [step for step in steps if step not in moved])
        self._folder.warn_of_following(restored, set(found.occupied).difference(moved))

    def _is_whole(self, path: str) -> bool:
        """Whether a checkpoint that was found damaged verifies, or cannot be read now, which says nothing about it."""
        try:
            return self._checkpointer.verify(path)
        except CheckpointUnreadableError as error:
            logger.warning("%s cannot be verified again: %s", path, error)
            return True
        except (CheckpointError, OSError):
            return False

    def _clean_up(self, *, waits: bool = True) -> Mapping[str, Mapping[str, Any]]:
        """Wait, bounded, for the writer of a dead run to finish its checkpoint; then delete what dead runs left.

        Args:
            waits: False: do not wait

        Returns:
            The manifests that were read for it, by the name of the folder.
        """
        run = self._run
        if waits:
            unfinished = wait_for_writers(run.fs, run.root, run.names, run.timeouts.close)
        else:
            unfinished = Unfinished(run.fs, run.root, run.names)
        for name in unfinished.sweep():
            logger.info("deleted %s, which a dead run left", name)
        return unfinished.manifests


def _unlisted(run: RunContext, error: OSError) -> CheckpointUnreadableError:
    """The error of a run whose folder, or that of another host, cannot be listed."""
    text = f"{run.root} cannot be listed: {error}. Start the run again when it can"
    if run.remote is not None:
        text += ", or without checkpoint.local.dir, to begin with what checkpoint.dir has"
    return CheckpointUnreadableError(f"{text}.", error.errno)
