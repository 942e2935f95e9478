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
    Durability,
    ExportFormat,
    FrozenMode,
    ReadMode,
    RecoveryMode,
    ReuseMode,
)
from ..core.outside import OUTSIDE, Outside
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
    storage_arguments,
)
from .weights import progress_of, read_once


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
    options = _snapshots(settings, outside)
    for option in options:
        option.begin_alone()
    find_storage = _storages(settings, options, storage_of, outside)
    run, policy = NoRun(find_storage, parts[2].single_file), error_policy(settings)
    shown = progress_of(ranks)
    context = SaveContext(ranks, find_storage, timeouts, run, policy, events, shown, settings)
    base = _base(settings, find_storage)
    bases = BaseFiles(lambda: base, find_storage(base[0]), NAMINGS[settings.naming.value]).find if base else _nowhere
    return _build_graph(context, parts, find_storage, bases, options)


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
    own_storage, save = storage_of is not None, save_policy(settings)
    options = _options(settings, launch.job, outside, own_storage=own_storage)
    find_storage = _storages(settings, options, storage_of, outside)
    folders = _folders(settings, launch.job, find_storage, outside, own_storage=own_storage)
    if not settings.enabled:
        off = _run(settings, *folders[0], ranks or LocalCoordinator(outside), EventRecorder(outside=outside))
        return record(CheckpointManager(None, off, save, None))
    parts, timeouts = _build_parts(settings), resolved_timeouts(settings)
    ranks = ranks or job_ranks("checkpointer", timeouts, outside)
    try:
        run, begun = _begin(settings, launch, ranks, folders, find_storage, options, own_storage=own_storage)
        followers, sources = list[Follower](), list[SnapshotSource]()
        for option, told in zip(options, begun, strict=True):
            run = option.join(run, told, saves=save.enabled)
            followers += option.followers(run, saves=save.enabled)
            sources += option.sources()
        resume = ResumePolicy(settings.resume, settings.rewind, load_options(settings))
        keep, files = retention_policies(settings)[0], {RUN_RECORD: launch.record()} if ranks.is_leader else {}
        folder = RunFolder(run, resume, keep, files, followers, takeover=settings.takeover)
        queue: MakeQueue = SaveQueue
        if save.enabled:
            folder.check_writable()
            for option in options:
                queue = option.queue(queue, run, parts[1], parts[2], followers)
        policy, shown = error_policy(settings), progress_of(ranks)
        context = SaveContext(
            ranks, run.saved_in, timeouts, folder, policy, run.events, shown, settings, unseen=run.unseen
        )
        # Options may have put folders of other hosts in front of the storage of a path.
        find = BaseFiles(partial(_bases, run.root, _base(settings, run.elsewhere), launch.job), run.fs, run.names).find
        checkpointer = _build_graph(context, parts, run.elsewhere, find, options, queue, run.hosts)
        restorer = Restorer(checkpointer, folder, save.enabled, sources)
    except BaseException:
        ranks.close()
        for option in options:
            option.abandon()
        raise
    return record(CheckpointManager(checkpointer, run, save, restorer, followers))


def _options(settings: Checkpoint, job: MultirunJob | None, outside: Outside, *, own_storage: bool) -> list[RunOption]:
    """The options that are on, each of which is imported only then.

    Raises:
        CheckpointConfigError: a value of one is wrong
    """
    options = list[RunOption]()
    if not settings.enabled:
        return options
    if settings.export.format is not ExportFormat.none:
        from .run_exports import RunExports

        options.append(RunExports(settings))
    if settings.local.dir is not None:
        from .run_local_folder import RunLocalFolder

        options.append(RunLocalFolder(settings, own_storage=own_storage))
    if settings.publish.to is not None:
        from .run_exports import RunPublishing

        options.append(RunPublishing(settings, settings.publish.to, job))
    return [*options, *_snapshots(settings, outside)]


def _snapshots(settings: Checkpoint, outside: Outside) -> list[RunOption]:
    """The option that keeps snapshots in memory, if it is on; a checkpointer without a manager has it too."""
    if settings.recovery.mode is RecoveryMode.none:
        return []
    from .run_snapshots import RunSnapshots

    return [RunSnapshots(settings, outside)]


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


def _folders(
    settings: Checkpoint,
    job: MultirunJob | None,
    find_storage: Callable[[str], Storage],
    outside: Outside,
    *,
    own_storage: bool,
) -> list[tuple[Storage, str]]:
    """The folders of the run with their storages, as this rank spells them, the nearest first."""
    named = [*filter(None, [settings.local.dir]), settings.dir]
    *near, far = named if job is None else map(job.root, named)
    # Of the folder in front, `commit` and `storage.options` say nothing.
    on_disk = Storages(durable=settings.durability is Durability.power_cut, outside=outside).of
    find_near = find_storage if own_storage else on_disk
    return [*((find_near(absolute(root)), root) for root in near), (find_storage(absolute(far)), far)]


def _run(
    settings: Checkpoint, storage: Storage, root: str, ranks: Coordinator, events: EventRecorder, **more: Any
) -> RunContext:
    """A run in one folder; `more` as for `RunContext`."""
    names, best = NAMINGS[settings.naming.value], best_policy(settings)
    return RunContext(storage, absolute(root), names, ranks, resolved_timeouts(settings), best, events, **more)


def _begin(
    settings: Checkpoint,
    launch: Launch,
    ranks: Coordinator,
    folders: Sequence[tuple[Storage, str]],
    find_storage: Callable[[str], Storage],
    options: Sequence[RunOption],
    *,
    own_storage: bool,
) -> tuple[RunContext, list[Any]]:
    """Begin a run on all ranks.

    Args:
        settings: the config
        launch: the script around the run
        ranks: all of them call this
        folders: as this rank spells them, with their storages, the nearest first
        find_storage: returns the storage of a path
        options: of the run
        own_storage: whether the storages were given

    Returns:
        The bare run, and what each of the options tells the ranks.
    """
    job, listeners, (near, _) = launch.job, build_listeners(settings.listeners), folders[0]
    outside, limit, saves = ranks.outside, resolved_timeouts(settings).stage, save_policy(settings).enabled

    def claim() -> list[str]:
        return [job.claim(fs, root) if job is not None and saves else root for fs, root in folders]

    # Hydra names the output folder of a job by each rank's clock, so rank 0's name is used.
    named = claim() if job is None else ranks.run_on_leader("root/job", claim, outside.now() + limit)
    roots = [absolute(root) for root in named]

    def begin(hosts: Sequence[str]) -> dict[str, Any]:
        told = [option.begun(near, roots[0]) for option in options]
        return {"token": new_token(outside), "hosts": Hosts(tuple(hosts)).runs(), "options": told}

    begun = ranks.decide("run/begin", outside.host_name(), begin, outside.now() + limit)
    # Events in files are not made durable, whatever the checkpoints are.
    recorded_in = near if own_storage or is_url(roots[0]) else None
    events = EventRecorder(
        EventFile(roots[0], ranks.rank, recorded_in) if settings.events else None,
        listeners,
        rank=ranks.rank,
        world_size=ranks.world_size,
        run=begun["token"],
        about={"preset": launch.preset, **_named_parts(settings), "versions": versions()},
        waits=not saves,
        outside=outside,
    )
    hosts, preset = Hosts.of_runs(begun["hosts"]), launch.preset
    bare = _run(settings, folders[-1][0], roots[-1], ranks, events, preset=preset, elsewhere=find_storage, hosts=hosts)
    run = bare if len(folders) == 1 else replace(bare, fs=near, root=roots[0], remote=bare)
    return run, begun["options"]


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
    context: SaveContext,
    parts: tuple[Stager, WriteCaller, Writer],
    storage_of: Callable[[str], Storage],
    find: Find,
    options: Sequence[RunOption] = (),
    queue: MakeQueue = SaveQueue,
    hosts: Hosts | None = None,
) -> Checkpointer:
    (stager, caller, writer), settings, ranks, timeouts = parts, context.settings, context.ranks, context.timeouts
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
    pipeline = SavePipeline(stager, caller, writer, replace(context, reuse=reuse), queue)
    collective = None
    if ranks.world_size > 1:
        # Which hosts the ranks are on, they ask at the first load if it is unknown.
        together = read_once if settings.read_once is not ReadMode.off else None
        collective = CollectiveLoads(ranks, timeouts, together, None if hosts is None else hosts.several)
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
        collective=collective,
        frozen=frozen,
    )
    if caller.in_other_process:
        return AsyncCheckpointer(stager, pipeline, reader)
    return SyncCheckpointer(pipeline, reader)


def _storages(
    settings: Checkpoint,
    options: Sequence[RunOption],
    storage_of: Callable[[str], Storage] | None,
    outside: Outside,
) -> Callable[[str], Storage]:
    """What returns the storage of a path, with what the options add; None: as the config says."""
    found = storage_of or Storages(**storage_arguments(settings), outside=outside).of
    for option in options:
        found = option.storage_of(found)
    return found


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
