"""The base class of listeners, which are called for saves and loads while a program trains."""

from __future__ import annotations

from typing import ClassVar

from .records import LoadReport, SaveReport


class CheckpointListener:
    """Called for the saves and loads of a run. Derive from it, define what you need, and pass it to `add_listener`.

    All methods are called on one thread of the run, `ckpt-events`, one after the other, in the order of the events. A
    slow method delays later events, but neither training nor a save; if more than 1,000 events wait, the newest are
    dropped with a warning. An exception is logged, once per listener, and fails nothing. `CheckpointManager.wait` and
    `close` return when the listeners have been called, or after `timeouts.close`.

    Attributes:
        every_rank: False: only the listener of rank 0 is called.
    """

    every_rank: ClassVar[bool] = True

    def on_staged(self, report: SaveReport) -> None:
        """Training may change the tensors of a save again."""

    def on_written(self, report: SaveReport) -> None:
        """This rank's files of a save are durable; the ranks have not voted yet."""

    def on_committed(self, report: SaveReport) -> None:
        """A checkpoint is visible, on all ranks."""

    def on_failed(self, report: SaveReport) -> None:
        """A save failed or was skipped; `report.outcome` and `report.error` say why."""

    def on_restored(self, report: LoadReport) -> None:
        """`CheckpointManager.restore` or `Checkpointer.load` has loaded a checkpoint."""

    def close(self) -> None:
        """The run is over; called once, after all others."""
