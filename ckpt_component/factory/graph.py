"""Build the checkpointer graph from a config.

It has `build_manager` and `build_checkpointer`, and the construction of the graph. Which parts fit is in
`config.rules`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from ..background.jobs import Follower
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
from ..core.coordination import Coordinator, Hosts, LocalCoordinator
from ..core.gc_control import collector_paused
from ..core.image.unchanged_files import CommittedFile, FileBytes, FileReuse, Find
from ..core.options import (
    Commit,
    Durability,
    ExportFormat,
    FrozenMode,
    ReadMode,
    RecoveryMode,
    ResolvedTimeouts,
    ReuseMode,
)
from ..core.outside import OUTSIDE, Outside
from ..core.progress import Progress, no_progress, progress_bar
from ..core.storage.locate import Storages, absolute, expanded, is_url, path_text
from ..core.storage.new_names import new_token
from ..core.storage.storage import Storage
from ..events import EventFile, EventRecorder
from ..formats.writer import PlansUnchanged, Writer, as_writer
from ..loading.collective import CollectiveLoads
from ..loading.meta_tensors import checked_device
from ..loading.reader import Reader, shares_host
from ..managing.manager import CheckpointManager
from ..managing.policies import ResumePolicy
from ..managing.recording import record
from ..managing.restore import Restorer
from ..managing.run_context import MakeQueue, MakeReader, RunContext, RunOption, SnapshotSource, job_ranks
from ..managing.run_folder import RunFolder
from ..saving.base_files import BaseFiles
from ..saving.context import NoRun, SaveContext
from ..saving.pipeline import SavePipeline
from ..saving.replica_comparison import ReplicaPolicy
from ..saving.save_queue import SaveQueue
from ..stagers.base import Stager
from ..state.frozen_weights import FrozenWeights
from ..state.unchanged_tensors import UnchangedTensors
from .launch import Launch, versions
from .run_policies import (
    best_policy,
    error_policy,
    load_options,
    resolved_timeouts,
    retention_policies,
    save_policy,
)
from .weights import read_once


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
    policy, options = error_policy(settings), _snapshots(settings, outside)
    for option in options:
        option.begin_alone()
        storage_of = option.storage_of(storage_of)
    run, shown = NoRun(storage_of, parts[2].single_file), _progress(ranks)
    context = SaveContext(ranks, storage_of, timeouts, run, policy, events, shown)
    base = _base(settings, storage_of)
    bases = BaseFiles(lambda: base, storage_of(base[0]), NAMINGS[settings.naming.value]).find if base else _nowhere
    return _build_graph(settings, parts, storage_of, context, bases, options)


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
    job, own_storage = launch.job, storage_of is not None
    resume, save = ResumePolicy(settings.resume, settings.rewind, load_options(settings)), save_policy(settings)
    options = _options(settings, job, outside, own_storage=own_storage)
    # The nearest first.
    roots = [*filter(None, [settings.local.dir]), settings.dir]
    roots = roots if job is None else [job.root(root) for root in roots]
    policy, timeouts = error_policy(settings), resolved_timeouts(settings)
    storage_of = storage_of or _storages(settings, outside)
    for option in options:
        storage_of = option.storage_of(storage_of)
    storages = [storage_of(absolute(roots[-1]))]
    if settings.local.dir is not None:
        storages.insert(0, storage_of(absolute(roots[0])) if own_storage else _local(settings, outside))
    names, best = NAMINGS[settings.naming.value], best_policy(settings)
    if not settings.enabled:
        own, events = ranks or LocalCoordinator(outside), EventRecorder(outside=outside)
        off = RunContext(storages[0], absolute(roots[0]), names, own, timeouts, best, events)
        return _recorded(CheckpointManager(None, off, save, None))
    parts, listeners = _build_parts(settings), build_listeners(settings.listeners)
    ranks = ranks or job_ranks("checkpointer", timeouts, outside)
    outside = ranks.outside
    try:
        if job is not None:
            # Hydra names the output folder by each rank's clock, so rank 0's name is used.
            claims = partial(_claims, job, storages, roots) if save.enabled else lambda: roots
            roots = ranks.run_on_leader("root/job", claims, outside.now() + timeouts.stage)
        roots = [absolute(root) for root in roots]
        begin = partial(_begin_run, outside, [partial(option.begun, storages[0], roots[0]) for option in options])
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
        if len(roots) > 1:
            run = replace(run, fs=storages[0], root=roots[0], remote=run)
        followers, sources = list[Follower](), list[SnapshotSource]()
        for option, told in zip(options, begun["options"], strict=True):
            run = option.join(run, told, saves=save.enabled)
            followers += option.followers(run, saves=save.enabled)
            sources += option.sources()
        files = {RUN_RECORD: launch.record()} if ranks.is_leader else {}
        keep = retention_policies(settings)[0]
        folder = RunFolder(run, resume, keep, files, followers, takeover=settings.takeover)
        queue: MakeQueue = SaveQueue
        if save.enabled:
            folder.check_writable()
            for option in options:
                queue = option.queue(queue, run, parts[1], parts[2], followers)
        shown = _progress(ranks)
        context = SaveContext(ranks, run.saved_in, timeouts, folder, policy, events, shown, unseen=run.unseen)
        base = _base(settings, run.elsewhere)
        find = BaseFiles(partial(_bases, run.root, base, job), run.fs, names).find
        checkpointer = _build_graph(settings, parts, run.elsewhere, context, find, options, queue, run.hosts)
        restorer = Restorer(checkpointer, folder, save.enabled, sources)
    except BaseException:
        ranks.close()
        for option in options:
            option.abandon()
        raise
    return _recorded(CheckpointManager(checkpointer, run, save, restorer, followers))


def _options(settings: Checkpoint, job: MultirunJob | None, outside: Outside, *, own_storage: bool) -> list[RunOption]:
    """The options that are on, each of which is imported only then.

    Raises:
        CheckpointConfigError: a value of one is wrong
    """
    options = list[RunOption]()
    if settings.enabled and settings.export.format is not ExportFormat.none:
        from .run_exports import RunExports

        options.append(RunExports(settings))
    if settings.enabled and settings.local.dir is not None:
        from .run_local_folder import RunLocalFolder

        options.append(RunLocalFolder(settings, own_storage=own_storage))
    if settings.enabled and settings.publish.to is not None:
        from .run_exports import RunPublishing

        options.append(RunPublishing(settings, settings.publish.to, job))
    return [*options, *_snapshots(settings, outside)]


def _snapshots(settings: Checkpoint, outside: Outside) -> list[RunOption]:
    """The option that keeps snapshots in memory, if it is on; a checkpointer without a manager has it too."""
    if not settings.enabled or settings.recovery.mode is RecoveryMode.none:
        return []
    from .run_snapshots import RunSnapshots

    return [RunSnapshots(settings, outside)]


def _recorded(manager: CheckpointManager) -> CheckpointManager:
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


def _begin_run(outside: Outside, asked: Sequence[Callable[[], Any]], names: Sequence[str]) -> dict[str, Any]:
    """On the leading rank: what all ranks are told when a run begins.

    Args:
        outside: what the run runs in
        asked: return what the options tell
        names: of each rank's host
    """
    hosts = Hosts(tuple(names)).runs()
    return {"token": new_token(outside), "hosts": hosts, "options": [each() for each in asked]}


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
    options: Sequence[RunOption] = (),
    queue: MakeQueue = SaveQueue,
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
    staging, make_reader = dict[str, Any](), cast(MakeReader, Reader)
    for option in options:
        staging |= option.staging()
        make_reader = option.reader(make_reader)
    reuse = FileReuse(None)
    if settings.reuse.mode is ReuseMode.auto and isinstance(writer, PlansUnchanged):
        unchanged, in_memory = UnchangedTensors(settings.reuse.frozen), "kept" in staging
        reuse = FileReuse(unchanged, find, writer.algorithm, in_memory=in_memory)
    frozen = FrozenWeights(ranks.rank) if settings.save.frozen is FrozenMode.skip else None
    if frozen is not None:
        staging["frozen"] = frozen
    stager.connect(
        writer, ranks=ranks, shared=shared, timeout=timeouts.stage, max_stall=timeouts.max_stall, reuse=reuse, **staging
    )
    replicas = ReplicaPolicy(settings.check_replicas, settings.on_different_replicas)
    context = replace(context, reuse=reuse, replicas=replicas)
    pipeline = SavePipeline(stager, caller, writer, context, queue)
    reader = make_reader(
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
