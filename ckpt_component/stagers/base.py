"""What a stager is: it inspects a state dict, plans its image once per structure, and takes snapshots."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch

from ..coordination import Coordinator
from ..errors import ranks_failed
from ..formats.base import FormatPlan, Writer
from ..image.arena import Arena
from ..image.layout import Layout
from ..memory.gc_control import collector_paused
from ..state.dedup import Selection, holdings, share_out
from ..state.flatten import FlatState, flatten, key_of
from ..state.objects import encode
from ..state.replicas import Replicas
from ..state.structure import Structure
from ..writing.range_writer import ByteSource
from ..writing.request import EncodedSave
from .optimizers import optimizers_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StatePlan:
    """A state dict as a save found it, and whether its layout is known.

    Attributes:
        flat: its tensors and objects.
        structure: of them.
        changed: the layout must be made anew, for this rank's or for another rank's sake.
        wait_until: monotonic seconds, beyond which `take` must not wait (`max_stall_s`).
    """

    flat: FlatState
    structure: Structure
    changed: bool
    wait_until: float = math.inf


@dataclass(frozen=True)
class Comparison:
    """What several ranks hold alike, to be compared when they begin to write.

    Attributes:
        replicas: knows their keys.
        message: digests, for rank 0.
    """

    replicas: Replicas
    message: dict[str, Any]


@dataclass(eq=False)
class Snapshot:
    """A state dict at one moment, laid out for writing. Owned by the save, which calls `release` when it ended.

    Attributes:
        layout: what lies where.
        encoded: the constant tables, and the encoded objects of this save.
        source: the bytes of the image; complete once `staged` is done.
        arena: the leased memory, or None where there is none.
        give_back: ends the lease; called with the arena and `staged`.
        comparison: what to compare with other ranks, in the saves in which they do so.
        staged: done when the image is complete; training may change every tensor by then, with a device buffer
            sooner (`Stager.wait_staged`). Has the error when staging failed.
        staged_at: when that was.
    """

    layout: Layout
    encoded: EncodedSave
    source: ByteSource
    arena: Arena | None = None
    give_back: Callable[[Arena, Future[None]], None] | None = None
    comparison: Comparison | None = None
    staged: Future[None] = field(default_factory=Future)
    staged_at: float = 0.0

    def mark_staged(self, error: BaseException | None = None) -> None:
        """Settle `staged`."""
        self.staged_at = time.perf_counter()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def release(self) -> None:
        """Return the arena to its pool, once nothing is copied into it any more; the second call does nothing."""
        arena, self.arena = self.arena, None
        give_back = self.give_back
        if arena is not None and give_back is not None:
            # A save may be given up while its copy still runs. The callback runs at once when it does not.
            self.staged.add_done_callback(partial(give_back, arena))


class Stager(ABC):
    """Takes the snapshot of a state dict, so that training may go on.

    A stager of your own derives from this, takes its settings in `__init__`, and defines `take`. The factory calls
    `connect` with the rest of the graph before the first save.
    """

    #: False: the writer reads the live tensors, so the trainer has to wait for it (`caller=inline`).
    takes_snapshot: ClassVar[bool] = True

    def connect(
        self, writer: Writer, *, ranks: Coordinator, shared: bool, timeout: float, max_stall: float | None = None
    ) -> None:
        """Set the parts of the graph that a stager works with.

        Args:
            writer: lays out the image.
            ranks: whose image it is, and who else stores the same things.
            shared: another process writes, so the memory must be visible to it.
            timeout: seconds that a snapshot may wait for memory that is still being written, and for other ranks.
            max_stall: seconds that a save may keep training waiting; None: no such limit.
        """
        self._writer = writer
        self._ranks = ranks
        self._timeout = timeout
        self._max_stall = max_stall
        self._structure: Structure | None = None
        self._plan: FormatPlan | None = None
        self._selection: Selection | None = None
        self._replicas: Replicas | None = None
        self._plans = 0
        self._lock = threading.Lock()

    def inspect(self, state_dict: Mapping[Any, Any]) -> StatePlan:
        """Flatten a state dict, and see whether it still has the structure that is planned for.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
        """
        with collector_paused(), torch.no_grad():
            flat = flatten(state_dict, self._ranks.rank, self._ranks.world_size)
            structure, plan = self._structure, self._plan
            if structure is not None and plan is not None and structure.matches(flat, plan.layout.relations):
                return StatePlan(flat, structure, False)
            return StatePlan(flat, Structure(flat), True)

    @abstractmethod
    def take(self, plan: StatePlan) -> Snapshot:
        """Take a snapshot of what was inspected just now. `Snapshot.staged` is done when it is complete.

        With several ranks all call this together: where the structure changed on one, they plan together.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
            CheckpointTimeoutError: no memory became free in time.
        """

    def compare(self, plan: StatePlan, number: int) -> Comparison | None:
        """Digests of what other ranks hold too, of the state that `take` was called with; None: not in this save.

        Values are compared when the plan is new, and in saves 2, 4, 8 and so on: what is equal at first may differ
        later.

        Args:
            plan: of the save.
            number: of the save, the same on all ranks.
        """
        if self._replicas is None or not (plan.changed or number & (number - 1) == 0):
            return None
        started = time.perf_counter()
        try:
            with torch.no_grad():
                message = self._replicas.message(plan.flat, number.bit_length())
        except Exception as error:  # the save does not need it
            logger.warning("cannot compare what the ranks share: %s: %s", type(error).__name__, error)
            return None
        logger.debug("digests of what the ranks share in %.3f s", time.perf_counter() - started)
        return Comparison(self._replicas, message)

    @property
    def busy(self) -> bool:
        """Whether the next snapshot would have to wait for an earlier save."""
        return not self.wait_free(0)

    def wait_free(self, deadline: float) -> bool:
        """Wait until `busy` is False. Returns False when it still is at `deadline` (monotonic seconds)."""
        return True

    def guard(self, optimizer: Any) -> None:
        """Keep an optimizer from changing weights that are still being copied. Most stagers need nothing for that.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`.

        Raises:
            CheckpointTypeError: it is none of these.
        """
        optimizers_in(optimizer)  # what one stager refuses, all do

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when every tensor may be changed. At once for stagers that are done when `take` returns."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan for a state dict of this structure, and allocate memory, so that the first save is as fast as others."""
        self._plan_for(self._inspect_together(state_dict))

    def close(self) -> None:
        """Free the memory that no save uses; the rest is freed when its save ends."""

    def _inspect_together(self, state_dict: Mapping[Any, Any]) -> StatePlan:
        """Inspect outside of a save, and agree with the other ranks whether they plan anew.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed; with several ranks a RanksError on all.
        """
        self._ranks.check_world()
        deadline = time.monotonic() + self._timeout
        try:
            plan = self.inspect(state_dict)
            for path, value in zip(plan.flat.object_paths, plan.flat.objects, strict=True):
                encode(value, key_of(path))  # refuses, by key, what a save would refuse
        except Exception as error:
            if self._ranks.world_size > 1:  # the others wait for this one, and all raise the same
                self._ranks.meet("prewarm", {"error": str(error)}, _any_changed, deadline)
            raise
        return replace(plan, changed=self._ranks.meet("prewarm", {"changed": plan.changed}, _any_changed, deadline))

    def _plan_for(self, plan: StatePlan) -> tuple[FormatPlan, FlatState]:
        """The layout of what this rank stores, and that part of the state."""
        with self._lock:
            if plan.changed or self._plan is None:
                started = time.perf_counter()
                replans, self._structure = self._plan is not None, None
                selection = self._select(plan)
                structure = plan.structure if selection is None else Structure(selection.of(plan.flat))
                self._plan = self._writer.plan(structure, self._ranks.rank)
                # Only now: a plan that failed must be made again next time.
                self._structure, self._selection = plan.structure, selection
                logger.info(
                    "planned %d tensors and %d objects in %.2f s%s",
                    len(structure.tensor_paths),
                    len(structure.object_paths),
                    time.perf_counter() - started,
                    ": the structure changed" if replans else "",
                )
                self._planned(self._plan)
            return self._plan, plan.flat if self._selection is None else self._selection.of(plan.flat)

    def _planned(self, plan: FormatPlan) -> None:
        """Called after a new plan was made."""

    def _select(self, plan: StatePlan) -> Selection | None:
        """Agree with the other ranks who stores what; None: this rank stores all that it has."""
        if self._ranks.world_size == 1 or not self._writer.shared:
            return None
        self._plans += 1
        deadline = min(time.monotonic() + self._timeout, plan.wait_until)
        share = self._ranks.scatter(f"plan/{self._plans}", holdings(plan.structure), share_out, deadline)
        self._replicas = Replicas(plan.structure, share, self._ranks.world_size)
        return Selection(plan.structure, share)


def _any_changed(messages: list[dict[str, Any]]) -> bool:
    """On the leading rank: whether the ranks have to plan; raises what kept one from inspecting its state."""
    failures = {rank: message["error"] for rank, message in enumerate(messages) if "error" in message}
    if failures:
        raise ranks_failed(failures)
    return any(message["changed"] for message in messages)
