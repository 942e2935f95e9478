"""Plan and finalize an asynchronous save with `FileSystemWriterAsync`: NVRx's pair of functions.

Ranks agree through the job's store, with a few bytes each. An error of any rank, including the coordinator, is raised
on all of them; errors are also torch's `CheckpointException`. Plans and results are gathered by a collective, and only
when they have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch.distributed.checkpoint.api import _is_wrapped_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from ..core.coordination import Coordinator, LocalCoordinator, RankStore, StoreCoordinator, distributed
from ..errors import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointWorldError,
    RanksError,
    describe_error,
    errno_of,
    ranks_failed,
)
from .bucket_io import FilesImage
from .file_system_writer_async import FileSystemWriterAsync, log_once
from .peers import as_save_error
from .torch_errors import as_checkpoint_exception

T = TypeVar("T")


@dataclass(frozen=True)
class Known(Generic[T]):
    """What a previous save has made, and what it was made for."""

    key: Any
    value: T


class CheckpointMetadataCache:
    """Plans, metadata, host memory and the connection to the other ranks, reused from save to save.

    Pass one object to every plan of a series of saves, on all ranks for the same saves. A plan is reused only if the
    fingerprints of all ranks are those it was made for.
    """

    def __init__(self) -> None:
        #: This rank's fingerprint, and its finished plan.
        self.plan: Known[SavePlan] | None = None
        #: On the coordinator: the fingerprints of all ranks, and the metadata made for them.
        self.whole: Known[Metadata] | None = None
        #: On the coordinator: digests of the results of all ranks, and the results.
        self.results: Known[list[list[WriteResult]]] | None = None
        #: Reused by the writers of successive saves.
        self.memory: list[FilesImage] = []
        self._coordinator: Coordinator | None = None
        self._ranks: list[int] = []
        self._saves = 0

    def next_save(self, process_group: Any) -> tuple[Coordinator, int]:
        """The coordinator of a group's ranks, and a number of the save that is the same on all of them.

        If the ranks or the default process group have changed, everything is discarded.
        """
        dist = distributed()
        ranks = [0] if dist is None else list(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        try:
            if self._coordinator is not None:
                self._coordinator.check_world()
        except CheckpointWorldError:
            self.close()
        if self._coordinator is None or self._ranks != ranks:
            self.close()
            self._coordinator, self._ranks = _connect(process_group, ranks), ranks
        self._saves += 1
        return self._coordinator, self._saves

    def forget(self) -> None:
        """Discard the plan; the next save plans again."""
        self.plan = self.whole = self.results = None

    def close(self) -> None:
        """Close the connection, free the memory, and discard everything."""
        self.forget()
        self.memory.clear()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None


def fingerprint_of(plan: SavePlan, planner: SavePlanner, world_size: int) -> str:
    """A hash of everything that the global plan and its metadata depend on: 8 bytes in hex.

    These are the keys, dtypes, shapes and offsets of the rank's own plan, how the planner flattened the state dict, its
    settings, and the world size. Strides do not matter, because stored tensors are contiguous.
    """
    digest = hashlib.blake2b(digest_size=8)

    def add(*values: Any) -> None:
        digest.update(repr(values).encode())

    add(world_size, type(planner).__qualname__, plan.usable, plan.planner_data)
    add(sorted((name, value) for name, value in vars(planner).items() if isinstance(value, (bool, int, str))))
    for item in plan.items:
        index, data = item.index, item.tensor_data
        add(index.fqn, index.offset and tuple(index.offset), index.index, item.type.name)
        if data is not None:
            add(tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size), data.properties)
    return digest.hexdigest()


def digest_of(results: Sequence[WriteResult]) -> str:
    """A hash of the locations of what a rank wrote: 8 bytes in hex."""
    places = [(result.index.fqn, result.storage_data) for result in results]
    return _digest_of([(key, place.relative_path, place.offset, place.length) for key, place in places])


def _connect(process_group: Any, ranks: list[int]) -> Coordinator:
    dist = distributed()
    if dist is None or len(ranks) == 1:
        return LocalCoordinator()
    # Groups of the same ranks share the counter; all ranks use them in the same order.
    purpose = f"dcp-save/{_digest_of(ranks)}"
    return StoreCoordinator(RankStore.of_group(int(dist.get_rank(process_group)), len(ranks), purpose).own())


def _digest_of(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


class SaveRanks(_DistWrapper):
    """The ranks of one save, which communicate by torch's collectives and through the store.

    Args:
        process_group: group of the ranks; None: all ranks
        cache: values reused between saves; None: nothing is reused
        timeout: seconds that ranks wait for each other at each step
    """

    def __init__(self, process_group: Any, cache: CheckpointMetadataCache | None, timeout: float) -> None:
        super().__init__(process_group, distributed() is not None, 0)
        self.cache = CheckpointMetadataCache() if cache is None else cache
        self.keeps_plans = cache is not None
        self._timeout = timeout
        self._coordinator, self._save = self.cache.next_save(process_group)

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        return self._coordinator.world_size

    def decide(
        self, step: str, value: dict[str, Any], failure: BaseException | None, decide: Callable[..., Any]
    ) -> Any:
        """Let the coordinator decide from the values of all ranks.

        Args:
            step: name of the step
            value: this rank's value, if it did not fail
            failure: this rank's error
            decide: called on the coordinator with all values, unless a rank failed

        Raises:
            RanksError: a rank or `decide` failed; raised on all ranks. A single rank raises its own error.
        """
        if failure is not None and self.world_size == 1 and isinstance(failure, CheckpointError):
            raise failure
        error = as_save_error(failure)
        own = value if error is None else {"error": str(error), "errno": getattr(error, "errno", None)}

        def judge(values: list[dict[str, Any]]) -> Any:
            failures = {rank: value["error"] for rank, value in enumerate(values) if "error" in value}
            if failures:
                errno = next((value["errno"] for value in values if value.get("errno") is not None), None)
                raise ranks_failed(failures, errno)
            return decide(values)

        try:
            return self._coordinator.decide(self._tag(step), own, partial(_as_rank_0, judge), self._deadline())
        except RanksError as error:
            if failure is not None:
                raise error from failure
            raise

    def run_on_leader(self, step: str, action: Callable[[], Any]) -> None:
        """Run `work` on the coordinator; its error is raised on all ranks, as RanksError."""
        self._coordinator.run_on_leader(self._tag(step), partial(_as_rank_0, action), self._deadline())

    def close(self) -> None:
        """Close the connection, unless it belongs to the cache."""
        if not self.keeps_plans:
            self.cache.close()

    def _tag(self, step: str) -> str:
        return f"save-{self._save}/{step}"

    def _deadline(self) -> float:
        return self._coordinator.outside.now() + self._timeout


@as_checkpoint_exception()
def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
    *,
    timeout: float = 600.0,
) -> tuple[FileSystemWriterAsync, Metadata | None, SaveRanks]:
    """Plan a save on all ranks, and prepare the writer. Call this on all ranks of the group.

    The plan of the last save is reused if the structures of all ranks are unchanged, which each save checks with 8
    bytes per rank.

    Args:
        state_dict: what to save
        storage_writer: a new one
        process_group: group of the ranks; None: all ranks
        coordinator_rank: must be 0
        planner: None: torch's DefaultSavePlanner
        enable_cache: for NVRx, which keeps plans in a global. Here only `metadata_cache` keeps them; without one, a
            warning is logged once.
        metadata_cache: keeps plans between saves. None: each save is planned again.
        timeout: seconds that ranks wait for each other at each step

    Returns:
        The arguments of `save_state_dict_async_finalize`: the writer, the metadata (None except on the coordinator),
        and the ranks.

    Raises:
        RanksError: it failed on a rank; the same error on all ranks
        CheckpointTimeoutError: a rank did not take part in time
    """
    if coordinator_rank != 0:
        raise CheckpointConfigError(f"coordinator_rank={coordinator_rank}: rank 0 of the group coordinates here.")
    if enable_cache and metadata_cache is None:
        log_once("enable_cache=True keeps no plans by itself here: pass metadata_cache=CheckpointMetadataCache() too.")
    ranks = SaveRanks(process_group, metadata_cache, timeout)
    cache = ranks.cache
    if storage_writer.image_memory is None:
        storage_writer.image_memory = cache.memory
    planner = DefaultSavePlanner() if planner is None else planner
    local: SavePlan | None = None
    fingerprint, failure = "", None
    try:
        planner.set_up_planner(
            state_dict, storage_meta=storage_writer.storage_meta(), is_coordinator=ranks.is_coordinator
        )
        storage_writer.set_up_storage_writer(ranks.is_coordinator)
        local = storage_writer.prepare_local_plan(planner.create_local_plan())
        if ranks.keeps_plans:
            fingerprint = fingerprint_of(local, planner, ranks.world_size)
        if cache.plan is not None and cache.plan.key == fingerprint:
            # Before the ranks agree on a known structure, so that this covers its errors too.
            storage_writer.prepare_write_data(planner.finish_plan(cache.plan.value), planner)
        else:
            cache.plan = None
    except Exception as error:
        failure = error

    fingerprints: list[str] = []  # filled on the coordinator by `is_known`, which alone sees all of them

    def is_known(values: list[dict[str, Any]]) -> bool:
        fingerprints.extend(value["fingerprint"] for value in values)
        return all(value["cached"] for value in values) and cache.whole is not None and cache.whole.key == fingerprints

    value = {"fingerprint": fingerprint, "cached": cache.plan is not None}
    if ranks.decide("structure", value, failure, is_known):
        return storage_writer, None if cache.whole is None else cache.whole.value, ranks
    assert local is not None  # otherwise there was a failure
    cache.forget()
    central, metadata = _plan_together(local, planner, storage_writer, ranks)
    try:
        storage_writer.prepare_write_data(planner.finish_plan(central), planner)
    except Exception as error:
        failure = error
    ranks.decide("prepared", {}, failure, lambda _: None)
    cache.plan = Known(fingerprint, central)
    cache.whole = None if metadata is None else Known(fingerprints, metadata)
    return storage_writer, metadata, ranks


@as_checkpoint_exception()
def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: _DistWrapper
) -> None:
    """Collect the results of all ranks and commit the checkpoint. Call this on all ranks, when all have written.

    Args:
        storage_writer: result of the plan, as the others
        global_metadata: the metadata, on the coordinator
        dist_wrapper: the ranks

    Raises:
        RanksError: a rank could not write, or the coordinator could not finish; the same error on all ranks. No
            checkpoint is visible then.
        CheckpointTimeoutError: a rank did not take part in time
    """
    ranks = dist_wrapper if isinstance(dist_wrapper, SaveRanks) else SaveRanks(dist_wrapper.group, None, 600.0)
    cache = ranks.cache
    result: Any = storage_writer.retrieve_write_results()
    failure = result[0] if _is_wrapped_exception(result) else None
    own: list[WriteResult] = [] if failure is not None else result

    def finish(results: list[list[WriteResult]]) -> None:
        if global_metadata is None:
            raise CheckpointError("The coordinator has no metadata; pass on what the plan returned.")
        storage_writer.finish(global_metadata, results)

    digests: list[str] = []  # filled by `finish_if_known`, which alone sees all of them

    def finish_if_known(values: list[dict[str, Any]]) -> bool:
        digests.extend(value["digest"] for value in values)
        if ranks.world_size == 1:
            finish([own])
        elif cache.results is not None and cache.results.key == digests:
            finish(cache.results.value)
        else:
            return False
        return True

    try:
        if ranks.decide("written", {"digest": digest_of(own)}, failure, finish_if_known):
            return
        results = ranks.gather_object(own)
        ranks.run_on_leader("finish", lambda: finish(results or []))
        if results is not None:
            cache.results = Known(digests, results)
    finally:
        ranks.close()


def _plan_together(
    local: SavePlan, planner: Any, storage_writer: FileSystemWriterAsync, ranks: SaveRanks
) -> tuple[SavePlan, Metadata | None]:
    """Make one plan of all ranks' plans, on the coordinator. Return this rank's part, and there also the metadata."""
    each_alone = all(getattr(part, "can_run_decentralized_global_plan", False) for part in (planner, storage_writer))
    plans = ranks.gather_object(local)
    global_plan: list[Any] = [None, None]

    def plan_all() -> None:
        central, metadata = planner.create_global_plan(plans)
        global_plan[:] = metadata, central if each_alone else storage_writer.prepare_global_plan(central)

    ranks.run_on_leader("plan", plan_all)
    metadata, parts = global_plan
    if each_alone:
        alone = planner.create_decentralized_global_plan(local)
        return storage_writer.prepare_decentralized_global_plan(alone), metadata
    return ranks.scatter_object(parts), metadata


def _as_rank_0(action: Callable[..., Any], *args: Any) -> Any:
    """Convert errors of the coordinator's work, so that they have one type on all ranks."""
    try:
        return action(*args)
    except CheckpointError:
        raise
    except Exception as error:
        raise ranks_failed({0: describe_error(error)}, errno_of(error)) from error
