"""Build the checkpointer graph from a config.

It has `build_manager` and `build_checkpointer`, and the construction of the graph. Which parts fit is in
`config.rules`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..background.exports import BackgroundExports
from ..background.follower import Follower
from ..callers.write_callers import WriteCaller
from ..checkpointer import AsyncCheckpointer, Checkpointer, SyncCheckpointer
from ..config.hydra.checks import refuse_bad_dir, refuse_bad_tiers
from ..config.hydra.compose import checked_overrides, compose_checkpoint
from ..config.hydra.hydra_errors import HydraConfigError, brief_refusals
from ..config.hydra.hydra_job import MultirunJob
from ..config.hydra.parts import build_listeners, construct_part, part_class
from ..config.hydra.resolve import resolve_config
from ..config.rules import PartFacts, refuse_unfit
from ..config.schema import PARTS, Checkpoint, part_option
from ..core.commit.names import NAMINGS, RUN_RECORD
from ..core.commit.retention import RetentionPolicy
from ..core.coordination import Coordinator, Hosts, LocalCoordinator
from ..core.image.file_reuse import FileReuse, Find
from ..core.image.unchanged_files import CommittedFile, FileBytes
from ..core.memory.gc_control import collector_paused
from ..core.options import Commit, Durability, FrozenMode, ReadMode, RecoveryMode, ResolvedTimeouts, ReuseMode
from ..core.outside import OUTSIDE, Outside
from ..core.progress import Progress, no_progress, progress_bar
from ..core.state.frozen_weights import FrozenWeights
from ..core.state.unchanged_tensors import UnchangedTensors
from ..core.storage.files import FileStorage, local_files
from ..core.storage.locate import Storages, absolute, expanded, is_url, path_text
from ..core.storage.new_names import new_token
from ..core.storage.storage import Storage
from ..events import EventFile, EventRecorder
from ..loading.collective import CollectiveLoads
from ..loading.meta_tensors import checked_device
from ..loading.reader import Reader, shares_host
from ..managing.manager import CheckpointManager
from ..managing.policies import ResumePolicy, SavePolicy
from ..managing.recording import record
from ..managing.restore import Restorer
from ..managing.run_context import RunContext, job_ranks
from ..managing.run_folder import RunFolder
from ..saving.base_files import BaseFiles
from ..saving.context import NoRun, SaveContext
from ..saving.pipeline import SavePipeline
from ..saving.replica_comparison import ReplicaPolicy
from ..saving.save_queue import SaveQueue
from ..stagers.base import Stager
from ..writers.base import PlansUnchanged, Writer, as_writer
from .launch import Launch, versions
from .run_policies import best_policy, error_policy, export_policy, load_options, resolved_timeouts
from .run_uploads import uploads_of
from .weights import read_once

if TYPE_CHECKING:
    from ..hosts.recovery import SnapshotParts
    from ..hosts.tier import HostTier
    from .run_publishing import RunPublishing

logger = logging.getLogger(__name__)


@brief_refusals
@collector_paused()
def build_checkpointer(
    config: Any,
    overrides: Sequence[str] = (),
    *,
    alone: bool = False,
    ranks: Coordinator | None = None,
    storage_of: Callable[[str], Storage] | None = None,
    outside: Outside | None = None,
) -> Checkpointer:
    """Build the checkpointer of a config.

    Args:
        config: the `checkpoint` node of a Hydra config, a dict of the same form, or a preset's name
            (`async_persistent`)
        overrides: as on a command line: `checkpoint.writer.workers=4`, `checkpoint/stager=pinned`
        alone: this rank saves and loads whole states for itself, even if `torch.distributed` has more ranks
        ranks: the ranks that save together, which the checkpointer closes; None: those of `torch.distributed`
        storage_of: returns the storage of an absolute path or URL, the same for the same place; None: files, and
            buckets by their scheme, as `checkpoint.durability`, `commit` and `storage.options` say
        outside: where time, threads and connections come from; a test may simulate them, with `ranks` and storages of
            the same. None: the real ones.

    Returns:
        A `SyncCheckpointer` if the caller is `inline`, else an `AsyncCheckpointer`.

    Raises:
        CheckpointConfigError: the config is wrong, or its parts do not fit together; nothing was built
    """
    outside, settings = outside or OUTSIDE, resolve_config(config, overrides)
    if not settings.enabled:
        raise HydraConfigError(
            "checkpoint.enabled=false builds no checkpointer; use build_manager(), whose manager then does nothing."
        )
    timeouts, parts = resolved_timeouts(settings), _build_parts(settings)
    if ranks is None:
        ranks = LocalCoordinator(outside) if alone else job_ranks("checkpointer", timeouts, outside)
    # Saved path by path, there is no folder for an event file.
    events = EventRecorder(None, build_listeners(settings.listeners), rank=ranks.rank, outside=ranks.outside)
    storage_of = storage_of or _storages(settings, outside)
    policy, snapshots = error_policy(settings), _snapshot_parts(settings, outside)
    if snapshots is not None:
        storage_of = snapshots.with_memory(storage_of)
        text = "%s: without a manager nothing stays in memory; loads take what others keep"
        logger.info(text, snapshots.mode)
    run, shown = NoRun(storage_of, parts[2].single_file), _progress(ranks)
    context = SaveContext(ranks, storage_of, timeouts, run, policy, events, shown)
    base = _base(settings, storage_of)
    bases = BaseFiles(lambda: base, storage_of(base[0]), NAMINGS[settings.naming.value]).find if base else _nowhere
    return _build_graph(settings, parts, storage_of, context, bases, snapshots)


@brief_refusals
@collector_paused()
def build_manager(
    config: Any,
    overrides: Sequence[str] = (),
    *,
    dir: str | os.PathLike[str] | None = None,
    storage_of: Callable[[str], Storage] | None = None,
    outside: Outside | None = None,
    ranks: Coordinator | None = None,
) -> CheckpointManager:
    """Build the manager for a training loop, with its checkpointer.

    Args:
        config: as for `build_checkpointer`
        overrides: as for `build_checkpointer`
        dir: the checkpoint folder, instead of `checkpoint.dir`. In a job of a Hydra multirun, a relative folder from
            either is relative to the job's output folder.
        storage_of: as for `build_checkpointer`
        outside: as for `build_checkpointer`
        ranks: as for `build_checkpointer`; the manager closes them

    Raises:
        CheckpointConfigError: the config is wrong, or its parts do not fit together, or another job of the multirun
            saves in the folder; nothing was built. Or a rank cannot write to the folder; raised on all ranks.
        CheckpointInUseError: another run on this host still saves in the folder, and `takeover` is false; on all ranks
    """
    preset = config if isinstance(config, str) else None
    overrides = checked_overrides(overrides)
    if dir is not None:
        _refuse_two_folders(overrides, dir)
    if isinstance(config, str):
        config, overrides = compose_checkpoint(config, overrides), ()
    settings = resolve_config(config, overrides)
    if dir is not None:
        settings.dir = _folder(dir)
        refuse_bad_tiers(settings)  # again, with this folder
    launch = Launch.of_process(preset, config, overrides)
    return manager_of(settings, launch, storage_of=storage_of, outside=outside or OUTSIDE, ranks=ranks)


def manager_of(
    settings: Checkpoint,
    launch: Launch,
    *,
    storage_of: Callable[[str], Storage] | None = None,
    outside: Outside = OUTSIDE,
    ranks: Coordinator | None = None,
) -> CheckpointManager:
    """Build the manager of a checked config.

    Args:
        settings: what `resolve_config` has returned
        launch: the script around the run
        storage_of: as for `build_manager`
        outside: as for `build_manager`
        ranks: as for `build_manager`

    Raises:
        CheckpointError: as `build_manager`
    """
    # The nearest first.
    roots = [*filter(None, [settings.local.dir]), settings.dir]
    resume = ResumePolicy(settings.resume, settings.rewind, load_options(settings))
    every = settings.save
    kept = settings.recovery.every_steps
    save = SavePolicy(every.every_steps, every.every_seconds, every.at_end, settings.overlap.value, kept)
    export, publish = export_policy(settings), _publishing(settings)
    job = launch.job
    roots = roots if job is None else [job.root(root) for root in roots]
    policy, timeouts = error_policy(settings), resolved_timeouts(settings)
    own_storage, storage_of = storage_of is not None, storage_of or _storages(settings, outside)
    snapshots = _snapshot_parts(settings, outside)
    if snapshots is not None:
        storage_of = snapshots.with_memory(storage_of)
    storages = [storage_of(absolute(roots[-1]))]
    if settings.local.dir is not None:
        storages.insert(0, storage_of(absolute(roots[0])) if own_storage else _local(settings, outside))
    names, best = NAMINGS[settings.naming.value], best_policy(settings)
    checkpointer, restorer, followers = None, None, list[Follower]()
    tier: HostTier | None = None
    events = EventRecorder(outside=outside)
    own = ranks or LocalCoordinator(outside)
    run = RunContext(storages[0], absolute(roots[0]), names, own, timeouts, best, events)
    if settings.enabled:
        parts, listeners = _build_parts(settings), build_listeners(settings.listeners)
        ranks = ranks or job_ranks("checkpointer", timeouts, outside)
        outside = ranks.outside
        try:
            if job is not None:
                # Hydra names the output folder by each rank's clock, so rank 0's name is used.
                claims = partial(_claims, job, storages, roots) if save.enabled else lambda: roots
                roots = ranks.run_on_leader("root/job", claims, outside.now() + timeouts.stage)
            roots = [absolute(root) for root in roots]
            lineage = None if snapshots is None else partial(snapshots.lineage, storages[0])
            begin = partial(_begin_run, outside, roots[0], lineage)
            begun = ranks.decide("run/begin", outside.host_name(), begin, outside.now() + timeouts.stage)
            # Events in files are not made durable, whatever the checkpoints are.
            recorded_in = storages[0] if own_storage or is_url(roots[0]) else None
            events = EventRecorder(
                EventFile(roots[0], ranks.rank, recorded_in) if settings.events else None,
                listeners,
                rank=ranks.rank,
                world_size=ranks.world_size,
                run=begun["token"],
                about={"preset": launch.preset, **_named_parts(settings), "versions": versions()},
                waits=not save.enabled,
                outside=outside,
            )
            if export is not None and save.enabled and ranks.is_leader:
                followers.append(BackgroundExports(export, events.note_now, outside))
            run = RunContext(
                storages[-1],
                roots[-1],
                names,
                ranks,
                timeouts,
                best,
                events,
                preset=launch.preset,
                elsewhere=storage_of,
                hosts=Hosts.of_runs(begun["hosts"]),
            )
            keep = RetentionPolicy(settings.keep.last, settings.keep.every_steps)
            if settings.local.dir is not None:
                disk = local_files(storages[0])
                if run.hosts.several and disk is not None and not own_storage:
                    tier = _host_tier(disk, roots[0], run, saves=save.enabled)
                    storages[0], roots[0] = tier.storage, tier.root
                    storage_of = partial(_storage_in, storages[0], storage_of)
                run = replace(run, fs=storages[0], root=roots[0], remote=run, elsewhere=storage_of)
                if save.enabled and (uploads := uploads_of(settings, run, keep)) is not None:
                    followers.append(uploads)
                keep = RetentionPolicy(settings.local.keep_last)
            if publish is not None and save.enabled:
                followers += publish.followers(run, job)
            if snapshots is not None:
                run = snapshots.begin(run, followers, named=begun["root"], lineage=begun["lineage"])
            files = {RUN_RECORD: launch.record()} if ranks.is_leader else {}
            folder = RunFolder(run, resume, keep, files, followers, takeover=settings.takeover)
            if save.enabled:
                folder.check_writable()
            saves_to = run.fs
            shown = _progress(ranks)
            place_of = (lambda _: saves_to) if run.memory is None else partial(_place_of, saves_to, run.memory)
            unseen = frozenset[int]() if tier is None else tier.unseen
            context = SaveContext(ranks, place_of, timeouts, folder, policy, events, shown, unseen=unseen)
            base = _base(settings, storage_of)
            find = BaseFiles(partial(_bases, roots[0], base, job), saves_to, names).find
            served_run = run if save.enabled else None
            checkpointer = _build_graph(settings, parts, storage_of, context, find, snapshots, served_run, run.hosts)
            restorer = Restorer(checkpointer, folder, save.enabled, None if snapshots is None else snapshots.earlier)
        except BaseException:
            ranks.close()
            if tier is not None:
                tier.close(waits=False)
            raise
    manager = CheckpointManager(checkpointer, run, save, restorer, followers, tier)
    record(manager)
    return manager


def instantiate_manager(**settings: Any) -> CheckpointManager:
    """Build the manager of a config whose keys are given as keywords.

    It is the `_target_` of the `checkpoint` node: `hydra.utils.instantiate(cfg.checkpoint, dir="runs/one")` calls it.
    Everything is checked as in `build_manager`, so a keyword that is not a key is refused.

    Args:
        **settings: the keys below `checkpoint`; `stager`, `caller` and `writer` are configs, which are not built yet

    Raises:
        CheckpointConfigError: as `build_manager`. Hydra raises it as the cause of an `InstantiationException`.
    """
    return build_manager(settings)


def _begin_run(
    outside: Outside, root: str, lineage: Callable[[str], Sequence[str]] | None, names: Sequence[str]
) -> dict[str, Any]:
    """On the leading rank: what all ranks are told when a run begins.

    Args:
        outside: what the run runs in
        root: its folder, the nearest one, as this rank spells it
        lineage: finds the runs that have owned it; None: nobody asks for them
        names: of each rank's host
    """
    begun = {"token": new_token(outside), "hosts": Hosts(tuple(names)).runs()}
    return begun if lineage is None else {**begun, "root": root, "lineage": lineage(root)}


def _named_parts(settings: Checkpoint) -> dict[str, str]:
    return {kind: part_option(kind, target) or target for kind, target in _targets(settings)}


def _targets(settings: Checkpoint) -> Iterator[tuple[str, str]]:
    return ((kind, str(getattr(settings, kind)["_target_"])) for kind in PARTS)


def _refuse_two_folders(overrides: Sequence[str], dir: str | os.PathLike[str]) -> None:
    """Refuse an override of the folder beside the argument `dir`: one of them would be ignored."""
    for text in overrides:
        if text.lstrip("+").partition("=")[0] == "checkpoint.dir":
            raise HydraConfigError(f"{text} and dir={str(dir)!r} both name the folder. Leave out one of them.")


def _folder(dir: str | os.PathLike[str]) -> str:
    """Check the argument `dir` like the key, and expand it."""
    root = path_text(dir, "dir")
    refuse_bad_dir(root)
    return expanded(root, "dir")


def _build_parts(settings: Checkpoint) -> tuple[Stager, WriteCaller, Writer]:
    """Build the chosen parts, starting nothing. Raises CheckpointConfigError if they do not fit together."""
    checked_device("checkpoint.load.device", settings.load.device)
    stager_class = part_class("stager", settings.stager, Stager)
    caller_class = part_class("caller", settings.caller, WriteCaller)
    writer_class = part_class("writer", settings.writer, Writer)
    refuse_unfit(
        settings,
        PartFacts(
            **{kind: part_option(kind, target) or target.rpartition(".")[2] for kind, target in _targets(settings)},
            takes_snapshot=stager_class.takes_snapshot,
            in_other_process=caller_class.in_other_process,
            single_file=bool(getattr(writer_class, "single_file", "")),
        ),
    )
    return (
        construct_part("stager", stager_class, settings.stager),
        construct_part("caller", caller_class, settings.caller),
        as_writer(construct_part("writer", writer_class, settings.writer)),
    )


def _build_graph(
    settings: Checkpoint,
    parts: tuple[Stager, WriteCaller, Writer],
    storage_of: Callable[[str], Storage],
    context: SaveContext,
    find: Find,
    snapshots: SnapshotParts | None = None,
    run: RunContext | None = None,
    hosts: Hosts | None = None,
) -> Checkpointer:
    (stager, caller, writer), ranks, timeouts = parts, context.ranks, context.timeouts
    if writer.single_file and ranks.world_size > 1:
        raise HydraConfigError(
            f"{type(writer).__name__} writes one file, and there are {ranks.world_size} ranks; save it from one of "
            "them, with build_checkpointer(..., alone=True), or use checkpoint/writer=dcp."
        )
    # An arena must be visible to the process that writes it, which depends on the caller, not the stager.
    shared = caller.in_other_process
    reuse = FileReuse(None)
    if settings.reuse.mode is ReuseMode.auto and isinstance(writer, PlansUnchanged):
        unchanged, in_memory = UnchangedTensors(settings.reuse.frozen), snapshots is not None
        reuse = FileReuse(unchanged, find, writer.algorithm, in_memory=in_memory)
    options = {} if snapshots is None else snapshots.room()
    frozen = FrozenWeights(ranks.rank) if settings.save.frozen is FrozenMode.skip else None
    if frozen is not None:
        options["frozen"] = frozen
    stager.connect(
        writer, ranks=ranks, shared=shared, timeout=timeouts.stage, max_stall=timeouts.max_stall, reuse=reuse, **options
    )
    replicas = ReplicaPolicy(settings.check_replicas, settings.on_different_replicas)
    context = replace(context, reuse=reuse, replicas=replicas)
    queue: Callable[..., SaveQueue] = SaveQueue
    if snapshots is not None and run is not None:
        queue = snapshots.queue(caller, writer, ranks, run)
    pipeline = SavePipeline(stager, caller, writer, context, queue)
    reader = (Reader if snapshots is None else snapshots.reader)(
        ranks.rank,
        ranks.world_size,
        settings.verify,
        shared=shares_host(ranks.world_size),
        storage_of=storage_of,
        progress=context.progress,
        prove=settings.load.prove,
        may_differ=settings.load.may_differ,
        device=checked_device("checkpoint.load.device", settings.load.device),
        collective=_collective(settings, ranks, timeouts, hosts) if ranks.world_size > 1 else None,
        frozen=frozen,
    )
    if caller.in_other_process:
        return AsyncCheckpointer(stager, pipeline, reader)
    return SyncCheckpointer(pipeline, reader)


def _collective(
    settings: Checkpoint, ranks: Coordinator, timeouts: ResolvedTimeouts, hosts: Hosts | None
) -> CollectiveLoads:
    """What makes the loads of all ranks; which hosts they are on, they ask at the first load if it is unknown."""
    reads_once = settings.read_once is not ReadMode.off
    return CollectiveLoads(ranks, timeouts, read_once if reads_once else None, None if hosts is None else hosts.several)


def _snapshot_parts(settings: Checkpoint, outside: Outside) -> SnapshotParts | None:
    """What keeps snapshots in memory; None: nothing does."""
    if not settings.enabled or settings.recovery.mode is RecoveryMode.none:
        return None
    from ..hosts.recovery import SnapshotParts  # which runs without recovery need not wait for

    return SnapshotParts(settings, outside)


def _publishing(settings: Checkpoint) -> RunPublishing | None:
    """What publishes weights, if the config says where to; raises as `RunPublishing`."""
    if not settings.enabled or settings.publish.to is None:
        return None
    from .run_publishing import RunPublishing  # which runs that publish nothing need not wait for

    return RunPublishing(settings, settings.publish.to)


def _host_tier(files: FileStorage, folder: str, run: RunContext, *, saves: bool) -> HostTier:
    """The local folders of several hosts; raises as `HostTier.begin`."""
    from ..hosts.tier import HostTier  # which runs on one host need not wait for

    tier = HostTier(files, folder, run.ranks, run.hosts, run.timeouts)
    try:
        tier.begin(saves=saves)
    except BaseException:
        tier.close(waits=False)
        raise
    return tier


def _storage_in(storage: Storage, elsewhere: Callable[[str], Storage], path: str) -> Storage:
    """A storage for the paths in it, and that of others elsewhere."""
    return storage if storage.hosts and storage.holds(path) else elsewhere(path)


def _place_of(storage: Storage, memory: RunContext, path: str) -> Storage:
    """The storage that a save goes to: the memory of the servers, or that of the run's folder."""
    return memory.fs if memory.fs.holds(path) else storage


def _progress(ranks: Coordinator) -> Progress:
    """Who follows the bytes: the terminal, of the one rank that has it."""
    # Ranks that save alone lead themselves; the terminal is that of all.
    return progress_bar if ranks.is_leader and os.environ.get("RANK", "0") == "0" else no_progress


def _storages(settings: Checkpoint, outside: Outside) -> Callable[[str], Storage]:
    return Storages(
        durable=settings.durability is Durability.power_cut,
        atomic_rename=settings.commit is Commit.rename,
        options=settings.storage.options,
        outside=outside,
    ).of


def _local(settings: Checkpoint, outside: Outside) -> Storage:
    return Storages(durable=settings.durability is Durability.power_cut, outside=outside).of(settings.local.dir or ".")


def _claims(job: MultirunJob, storages: Sequence[Storage], roots: Sequence[str]) -> list[str]:
    """Record that a job of a multirun saves in these folders."""
    return [job.claim(fs, root) for fs, root in zip(storages, roots, strict=True)]


def _base(settings: Checkpoint, storage_of: Callable[[str], Storage]) -> list[str]:
    """`reuse.base`, if there is one. Raises CheckpointConfigError if it does not exist."""
    if settings.reuse.base is None:
        return []
    base = absolute(settings.reuse.base)
    if not storage_of(base).exists(base):
        raise HydraConfigError(
            f"checkpoint.reuse.base={base} does not exist; name the folder of a run, or a checkpoint, on the file "
            "system of checkpoint.dir."
        )
    return [base]


def _bases(root: str, base: Sequence[str], job: MultirunJob | None) -> list[str]:
    """Folders and checkpoints whose files a run may share: its own, of its base, of the other jobs of a multirun."""
    return [root, *base, *(job.others(root) if job is not None else [])]


def _nowhere(wanted: Mapping[int, FileBytes], storage: Storage, elsewhere: bool) -> Mapping[int, CommittedFile]:
    """There is no base."""
    return {}
