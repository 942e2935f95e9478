"""What a stager is, and the plan that all of them make."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..coordination import Coordinator, Meetings
from ..errors import CheckpointError, RanksError, ranks_failed
from ..formats.base import FormatPlan, Writer
from ..image.layout import Structure
from ..memory.gc_control import collector_paused
from ..state.dedup import Selection, holdings, share_out
from ..state.flatten import FlatState, flatten, key_of
from ..state.objects import encode
from ..state.replicas import Replicas
from .optimizers import optimizers_in
from .snapshot import Comparison, Snapshot, Survey

logger = logging.getLogger(__name__)


class Stager(ABC):
    """Takes the snapshot of a state dict, so that training may go on.

    A stager of one's own derives from this, takes its settings in `__init__`, and defines `take`. The factory calls
    `connect` with what the rest of the graph decides, before the first save.
    """

    #: False: the writer reads the live tensors, so the trainer has to wait for it (`caller=inline`).
    takes_snapshot: ClassVar[bool] = True
    #: Seconds that a save may keep training waiting, where there is such a limit; set by the factory.
    max_stall: float | None = None

    def connect(self, writer: Writer, *, ranks: Coordinator, shared: bool, timeout: float) -> None:
        """Learn the rest of the graph.

        Args:
            writer: lays out the image.
            ranks: whose image it is, and who else stores the same things.
            shared: another process writes, so the memory must be visible to it.
            timeout: seconds that a snapshot may wait for memory that is still being written, and for other ranks.
        """
        self._writer = writer
        self._ranks = ranks
        self._shared = shared
        self._timeout = timeout
        self._structure: Structure | None = None
        self._plan: FormatPlan | None = None
        self._selection: Selection | None = None
        self._replicas: Replicas | None = None
        self._plans = 0
        self._prewarms = Meetings(ranks, "prewarm")
        self._lock = threading.Lock()

    def survey(self, state_dict: Mapping[Any, Any]) -> Survey:
        """Look at a state dict, and whether it still has the structure that is planned for.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
        """
        started = time.perf_counter()
        with collector_paused(), torch.no_grad():
            flat = flatten(state_dict, self._ranks.rank, self._ranks.world_size)
            known = self._structure
            if known is not None and known.matches(flat):
                return Survey(flat, known, False, started)
            return Survey(flat, Structure(flat), True, started)

    @abstractmethod
    def take(self, survey: Survey) -> Snapshot:
        """Take a snapshot of what was surveyed just now. `Snapshot.staged` tells when it is complete.

        With several ranks all call this together: where the structure changed on one, they plan together.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
            CheckpointTimeoutError: no memory became free in time.
        """

    def compare(self, survey: Survey, number: int) -> Comparison | None:
        """What other ranks hold too of the state that `take` was called with, in digests. None: nobody looks this time.

        All look when the plan is new, and at the saves 2, 4, 8 and so on: what is equal at first may part later.

        Args:
            survey: of the save.
            number: of the save, alike on all ranks.
        """
        if self._replicas is None or not (survey.changed or number & (number - 1) == 0):
            return None
        started = time.perf_counter()
        try:
            with torch.no_grad():
                message = self._replicas.message(survey.flat, number.bit_length())
        except Exception as error:
            # The save is none the worse for it.
            logger.warning("whether values differ by rank cannot be looked at: %s: %s", type(error).__name__, error)
            return None
        logger.debug("digests of what the ranks share in %.3f s", time.perf_counter() - started)
        return Comparison(self._replicas, message)

    @property
    def busy(self) -> bool:
        """Whether the next snapshot would have to wait for an earlier save."""
        return False

    def wait_free(self, deadline: float) -> bool:
        """Wait until `busy` is False. Returns False when it still is at `deadline` (monotonic seconds)."""
        return not self.busy

    def guard(self, optimizer: Any) -> None:
        """Keep an optimizer from changing weights that are still being copied. Nothing to do for most stagers.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`.

        Raises:
            CheckpointTypeError: it is none of these.
        """
        for each in optimizers_in(optimizer):
            self._guard(each)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Guard one optimizer."""

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when every tensor may be changed. At once for stagers that are done when `take` returns."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan for a state dict of this structure, and take the memory, so that the first save costs what others do."""
        self._plan_for(self._surveyed_together(state_dict))

    def close(self) -> None:
        """Free the memory that no save uses; the rest is freed when its save ends."""

    def _surveyed_together(self, state_dict: Mapping[Any, Any]) -> Survey:
        """A survey outside of a save, after which all ranks know whether they have to plan.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed; with several ranks a RanksError on all.
        """
        self._ranks.world.check()
        survey, failure = None, None
        try:
            survey = self.survey(state_dict)
            for path, value in zip(survey.flat.object_paths, survey.flat.objects, strict=True):
                encode(value, key_of(path))  # refuses, by key, what a save would refuse
        except Exception as error:  # the other ranks wait for this one
            if self._ranks.world_size == 1:
                raise
            failure = error
        deadline = time.monotonic() + self._timeout
        answer = [survey is not None and survey.changed, None if failure is None else str(failure)]
        try:
            changed = self._prewarms.ask(answer, _any_changed, deadline)
        except RanksError as error:
            raise error from failure
        if survey is None:
            raise CheckpointError("The ranks agreed on a plan that this one cannot take part in.") from failure
        survey.changed = changed
        return survey

    def _plan_for(self, survey: Survey) -> tuple[FormatPlan, FlatState]:
        """The plan for what this rank stores, and that part of the state: the last plan, or a new one."""
        with self._lock:
            if survey.changed:
                started = time.perf_counter()
                known, self._structure = self._plan is not None, None
                selection = self._select(survey)
                mine = survey.structure if selection is None else Structure(selection.of(survey.flat))
                self._plan = self._writer.plan(mine, self._ranks.rank)
                # Only now: a plan that failed must be made again next time.
                self._structure, self._selection = survey.structure, selection
                logger.info(
                    "planned %d tensors and %d objects in %.2f s%s",
                    len(mine.tensor_paths),
                    len(mine.object_paths),
                    time.perf_counter() - started,
                    ": the structure changed" if known else "",
                )
                self._planned(self._plan)
            if self._plan is None:
                raise CheckpointError("A snapshot was asked for before its state was surveyed.")
            return self._plan, survey.flat if self._selection is None else self._selection.of(survey.flat)

    def _planned(self, plan: FormatPlan) -> None:
        """A new plan was made."""

    def _select(self, survey: Survey) -> Selection | None:
        """Agree with the other ranks who stores what; None: this rank stores all that it has."""
        if self._ranks.world_size == 1 or not self._writer.shared:
            return None
        self._plans += 1
        deadline = min(time.monotonic() + self._timeout, survey.wait_until)
        mine = self._ranks.deal(f"plan/{self._plans}", holdings(survey.structure), share_out, deadline)
        objects, tensors = mine["alike"]
        self._replicas = Replicas(survey.structure, objects, tensors, mine["groups"], self._ranks.world_size)
        return Selection(survey.structure, mine)


def _any_changed(answers: list[tuple[bool, str | None]]) -> bool:
    """On the leading rank: whether the ranks have to plan; raises what kept one from looking at its state."""
    failures = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
    if failures:
        raise ranks_failed(failures)
    return any(changed for changed, _ in answers)
