"""Base class of stagers: inspect a state dict, plan its image once per structure, and take snapshots."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import torch

from ..core.coordination import Coordinator
from ..core.gc_control import collector_paused
from ..core.image.arena import Arena
from ..core.image.layout import Layout
from ..core.image.unchanged_files import FileReuse, UnchangedFiles
from ..core.outside import OUTSIDE, Future
from ..core.storage.storage import Storage
from ..core.writing.request import ByteSource, EncodedSave
from ..errors import CheckpointTypeError
from ..formats.writer import FormatPlan, PlansUnchanged, Writer
from ..state.flatten import FlatState, flatten, is_torch_own
from ..state.frozen_weights import FrozenWeights
from ..state.module_trial import warn_of_refusals
from ..state.objects import encode, refuse_fake_tensors
from ..state.parameter_names import ParameterNames
from ..state.paths import key_of
from ..state.replicas import Selection, Share
from ..state.structure import Structure

#: Attributes that hold the wrapped or chained optimizers: of Accelerate, DeepSpeed and Apex, and of Megatron.
_INSIDE = ("optimizer", "chained_optimizers")


def optimizers_in(given: Any) -> list[torch.optim.Optimizer]:
    """Return all torch optimizers in a value, each once.

    A wrapper that derives from torch's class may have no hooks, so the wrapped optimizer is preferred.

    Raises:
        CheckpointTypeError: the value, or one of its items, has no optimizer; the text says what to pass
    """
    return list({id(optimizer): optimizer for optimizer in _inside(given, [])}.values())


def _inside(given: Any, outer: list[Any]) -> list[torch.optim.Optimizer]:
    items = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(items, (list, tuple)) and items:
        return [optimizer for item in items for optimizer in _inside(item, outer)]
    inner = next((getattr(given, name) for name in _INSIDE if getattr(given, name, None) is not None), None)
    if inner is not None and all(inner is not wrapper for wrapper in [*outer, given]):
        return _inside(inner, [*outer, given])
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    raise CheckpointTypeError(
        "guard() takes a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`, not "
        f"{_kind(given)}; pass what changes the weights: guard(optimizer)."
    )


def _kind(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    empty = "an empty " if isinstance(given, (list, tuple, Mapping)) else "a "
    return f"{empty}{type(given).__name__}"


logger = logging.getLogger(__name__)

#: A plan that takes longer is worth a line.
_SLOW_PLAN_S = 0.5
#: Held while the holders of a snapshot are counted; for a moment, so all snapshots share it.
_HOLDING = OUTSIDE.lock()


@dataclass(frozen=True)
class StatePlan:
    """An inspected state dict, and whether its layout must be planned.

    Attributes:
        flat: its tensors and objects
        structure: their structure
        changed: the layout must be planned again, because of this rank or another one
        wait_until: deadline for waits in `take`, seconds of `Outside.now` (`max_stall_s`)
        storage: where the state is saved; None: this is not a save
        share: if `changed`, which part of the state this rank is to store; None: all of it
    """

    flat: FlatState
    structure: Structure
    changed: bool
    wait_until: float = math.inf
    share: Share | None = None
    storage: Storage | None = None


@dataclass(eq=False)
class Snapshot:
    """A state dict at one moment, laid out for writing. Owned by the save, which calls `release` when it ends.

    Others may `hold` it too, such as who writes the same image to another place.

    Attributes:
        layout: where each item is in the image
        encoded: the constant tables, and the encoded objects of this save
        source: the bytes of the image; complete once `staged` is done
        arena: the leased memory, or None
        give_back: ends the lease; called with the arena and `staged`
        staged: done when the image is complete. Has the error if staging failed.
        copied: what the caller of a save gets: once he sees it done, he may change every tensor. Asked a last time when
            all is written; has TornSnapshotError if a tensor changed before. By default `staged`.
        staged_at: when `staged` was done (`time.perf_counter`)
        unchanged: the files of unchanged tensors, which may be shared with an earlier checkpoint; None: there are none
        began_at: when the copy began; by default when this object is made
        planned_at: when the plan was made, and the wait for memory began; 0: no such wait
    """

    layout: Layout
    encoded: EncodedSave
    source: ByteSource
    arena: Arena | None = None
    give_back: Callable[[Arena, Future[None]], None] | None = None
    staged: Future[None] = field(default_factory=Future)
    copied: Future[None] = field(init=False)
    staged_at: float = 0.0
    unchanged: UnchangedFiles | None = None
    began_at: float = field(default_factory=perf_counter)
    planned_at: float = 0.0
    _holders: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        self.copied = self.staged

    def mark_staged(self, error: BaseException | None = None) -> None:
        """Complete `staged`, with an error if there is one."""
        self.staged_at = perf_counter()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def hold(self) -> None:
        """Have one more holder, who calls `release` once: the memory stays until all have. Called by one of them."""
        with _HOLDING:
            self._holders += 1

    def release(self) -> None:
        """Let go of the snapshot. The last holder returns the arena, after the copy; another call does nothing."""
        with _HOLDING:
            arena, self._holders = self.arena, max(self._holders - 1, 0)
            if arena is None or self._holders:
                return
            self.arena = None
        if self.give_back is not None:
            # A save may be given up while its copy is running; if it is not, the callback runs at once.
            self.staged.add_done_callback(partial(self.give_back, arena))


class Stager(ABC):
    """Takes the snapshot of a state dict, so that training may continue.

    A custom stager derives from this class, takes its settings in `__init__`, and implements `take`. The factory calls
    `connect` with the rest of the graph before the first save.
    """

    #: False: the writer reads the live tensors, so the trainer must wait for it (`caller=inline`).
    takes_snapshot: ClassVar[bool] = True

    def connect(
        self,
        writer: Writer,
        *,
        ranks: Coordinator,
        shared: bool,
        timeout: float,
        max_stall: float | None = None,
        reuse: FileReuse | None = None,
        kept: int = 0,
        in_flight: int = 1,
        frozen: FrozenWeights | None = None,
    ) -> None:
        """Set the other parts of the graph that a stager uses.

        Args:
            writer: lays out the image
            ranks: coordinator of the ranks: which of them this is
            shared: whether another process writes, so that the memory must be visible to it
            timeout: seconds that a snapshot may wait for free memory, and for other ranks
            max_stall: seconds that a save may block training; None: no limit
            reuse: decides which files a snapshot shares with an earlier one; None: none
            kept: how many images stay in memory after their save
            in_flight: how many others there must be room for, if the stager's own settings say fewer
            frozen: leaves frozen parameters out of what is saved; None: they are saved
        """
        self._writer = writer
        self._ranks = ranks
        self._timeout = timeout
        self._max_stall = max_stall
        self._reuse = FileReuse(None) if reuse is None else reuse
        self._kept, self._in_flight = kept, in_flight
        self._structure: Structure | None = None
        self._plan: FormatPlan | None = None
        self._selection: Selection | None = None
        self._names = ParameterNames()
        self._refused = set[str]()
        self._frozen = frozen
        self._lock = ranks.outside.lock()
        self._connected(shared=shared)

    def _connected(self, *, shared: bool) -> None:
        """Called at the end of `connect`."""

    def inspect(self, state_dict: Mapping[Any, Any]) -> StatePlan:
        """Flatten a state dict, and check whether it still has the planned structure.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key
            CheckpointError: a mode of torch makes tensors without memory
        """
        refuse_fake_tensors()
        # In inference mode, a module with DTensors does not give its state.
        with collector_paused(), torch.inference_mode(False), torch.no_grad():
            flat = whole = flatten(state_dict, self._ranks.rank, self._ranks.world_size)
            if self._frozen is not None:
                flat = self._frozen.leave_out(whole)
            structure, plan = self._structure, self._plan
            pointers = None
            if structure is not None and plan is not None:
                self._names.add_to(flat)
                pointers = structure.matches(flat, plan.layout.relations)
            if structure is None or pointers is None:
                self._names.add_to(flat, again=True)
                structure = Structure(flat)
                if any(isinstance(value, torch.nn.Module) and not is_torch_own(value) for _, value in flat.stateful):
                    warn_of_refusals(whole, self._refused)
                self._reuse.observe(structure, flat)
                return StatePlan(flat, structure, True)
            flat.pointers = pointers
            return StatePlan(flat, structure, self._reuse.observe(structure, flat))

    @abstractmethod
    def take(self, plan: StatePlan) -> Snapshot:
        """Take a snapshot of the inspected state. `Snapshot.staged` is done when it is complete.

        All ranks call this together: if the structure has changed on one, all plan again.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key
            CheckpointTimeoutError: no memory became free in time
        """

    @property
    def busy(self) -> bool:
        """Whether the next snapshot would have to wait for an earlier save."""
        return not self.wait_free(0)

    def wait_free(self, deadline: float) -> bool:
        """Wait until `busy` is False. Returns False when it still is at `deadline` (`Outside.now`)."""
        return True

    @property
    def host_bytes(self) -> int:
        """Host memory that is held for snapshots."""
        return 0

    def guard(self, optimizer: Any) -> None:
        """Keep an optimizer from changing weights that are still being copied. Most stagers do nothing.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`

        Raises:
            CheckpointTypeError: `optimizer` is not one of these
        """
        optimizers_in(optimizer)  # all stagers refuse the same arguments

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until every tensor may be changed. Returns at once for stagers that are done when `take` returns."""

    def prewarm(self, plan: StatePlan) -> None:
        """Plan and allocate memory for states of this structure, so that the first save is as fast as others."""
        self._plan_for(plan)

    def prepare(self, plan: StatePlan) -> None:
        """Plan, and begin to allocate memory for states of this structure; by default, the same as `prewarm`."""
        self.prewarm(plan)

    def reserve(self, state_dict: Mapping[Any, Any]) -> None:
        """Begin to make memory for the first save in the background, by the size of this state. No rank waits.

        Called by the thread that saves, before the first save, and again while the state may still grow. A stager whose
        memory need not be made does nothing.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key
            CheckpointError: there is not enough memory
        """

    def close(self) -> None:
        """Free the memory that no save is using; the rest is freed when its save ends."""

    def _plan_for(self, plan: StatePlan) -> tuple[FormatPlan, FlatState]:
        """Return the layout of what this rank stores, and that part of the state."""
        with self._lock:
            if plan.changed or self._plan is None:
                started = perf_counter()
                replans, before, self._structure = self._plan is not None, self._structure, None
                selection = None if plan.share is None else Selection(plan.structure, plan.share)
                flat = plan.flat if selection is None else selection.of(plan.flat)
                structure = plan.structure if selection is None else Structure(flat)
                writer, rank = self._writer, self._ranks.rank
                if isinstance(writer, PlansUnchanged) and (unchanged := self._reuse.group(structure, flat)):
                    self._plan = writer.plan_unchanged(structure, rank, unchanged)
                else:
                    self._plan = writer.plan(structure, rank)
                # Set last, so that a plan that failed is made again next time.
                self._structure, self._selection = plan.structure, selection
                seconds = perf_counter() - started
                why = "the structure changed" if plan.structure is not before else "other tensors keep their values now"
                # Usual and quick, so it is not reported; but a structure that changes, or is large, makes saves slow.
                logger.log(
                    logging.INFO if replans or seconds > _SLOW_PLAN_S else logging.DEBUG,
                    "planned %d tensors and %d objects in %.2f s%s",
                    len(structure.tensor_paths),
                    len(structure.object_paths),
                    seconds,
                    f": {why}" if replans else "",
                )
                self._planned(self._plan)
            return self._plan, plan.flat if self._selection is None else self._selection.of(plan.flat)

    def _planned(self, plan: FormatPlan) -> None:
        """Called after a new plan was made."""


def check_objects(flat: FlatState) -> None:
    """Raise what a save would raise for an object, with its key."""
    for path, value in zip(flat.object_paths, flat.objects, strict=True):
        encode(value, key_of(path))
