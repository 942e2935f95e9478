"""The base class of listeners, which are called for saves and loads while a program trains."""

from __future__ import annotations

from typing import ClassVar

from .reports import LoadReport, SaveReport


class CheckpointListener:
    """Called for the saves and loads of a run. Derive from it, define what you need, and pass it to `add_listener`.

    The methods of a listener are called one after the other, in the order of the events, on a thread of its own. A slow
    method delays the later events of this listener, but neither training, nor a save, nor other listeners; a warning
    names one that takes longer than 10 s, and if more than 1,000 events wait, the newest are dropped with a warning. An
    exception, even `SystemExit`, is logged, once per listener, and ends nothing. `CheckpointManager.wait` and `close`
    return when the listeners have been called, or after `timeouts.close`; then they do not wait again.

    Attributes:
        every_rank: False: only the listener of rank 0 is called
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

    def on_at_peers(self, report: SaveReport) -> None:
        """The snapshot of a save has copies in the memory of other hosts (`checkpoint/recovery=peers`)."""

    def on_restored(self, report: LoadReport) -> None:
        """`CheckpointManager.restore` or `Checkpointer.load` has loaded a checkpoint."""

    def close(self) -> None:
        """The run is over; called once, after all others."""
