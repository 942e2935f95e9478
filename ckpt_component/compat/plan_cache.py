"""What planning reuses from the previous save, and the fingerprint that shows whether it is still valid."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from ..core.coordination import Coordinator, LocalCoordinator, RankStore, StoreCoordinator, distributed
from ..errors import CheckpointWorldError
from .bucket_image import FilesImage

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
        """Discard the plan; the next save plans anew."""
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
