"""What a manager says of itself: its `repr`, and a line at the end of a run."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterable, Sequence

from ..core.commit.names import MANIFEST
from ..core.storage.locate import is_url
from ..core.storage.space import amount
from ..errors import CheckpointError
from ..events import SaveReport
from ..saving.save_queue import SaveHandle
from .run_context import RunContext

logger = logging.getLogger(__name__)


def contents_text(run: RunContext, reports: Sequence[SaveReport]) -> str:
    """What the folder of a run holds, from its listing: `3 checkpoints in checkpoints, newest 300 (2 min ago)`.

    Never raises. A bucket is not asked, because that may take seconds; of one, the text has what this run saved.

    Args:
        run: the run
        reports: those of its saves
    """
    where, places = shown_path(run.root), [run, *filter(None, [run.remote])]
    local = [place for place in places if not is_url(place.root)]
    times = dict[int, float]()
    try:
        for place in local:
            times |= _listed(place)
    except (CheckpointError, OSError) as error:
        return f"{where} cannot be listed ({error})"
    if not local:
        saved = [report for report in reports if report.outcome == "committed" and not report.memory]
        times = {report.step or 0: report.time + report.committed_s for report in saved}
    if not times:
        return f"no checkpoint in {where}" if local else f"nothing saved to {where} yet"
    newest, count = max(times), _counted(len(times))
    ago = _ago(run.ranks.outside.date() - times[newest])
    return f"{count} {'in' if local else 'saved to'} {where}, newest {newest} ({ago})"


def warn_of_idle(run: RunContext, step: int | None) -> None:
    """Warn, on the leading rank, that a run ends at the step that it restored; None: it restored none."""
    if step is not None and run.ranks.is_leader:
        logger.warning("restored step %d from %s and saw no further step: nothing was trained", step, run.root)


def warn_of_open(run: RunContext, step: int | None) -> None:
    """Warn, on the leading rank, that the program ends without `close`, and so without a step; None: it is saved."""
    if step is not None and run.ranks.is_leader:
        text = "step %d is not saved: the program ended before the end of `with build_manager(...) as manager:`"
        logger.warning(text, step)


def warn_of_wait(saves: Iterable[SaveHandle]) -> None:
    """After Ctrl-C: otherwise the wait looks like a hang, and a second Ctrl-C like the loss of the save."""
    for save in saves:
        if not save.done():
            text = "interrupted; waiting until step %s is saved. Another Ctrl-C does not lose it."
            logger.warning(text, save.step)


def log_saves(run: RunContext, reports: Sequence[SaveReport]) -> None:
    """Log, on the leading rank, what the saves of a run have come to."""
    text = saves_text(run, reports) if run.ranks.is_leader else None
    if text is not None:
        logger.info(text)


def saves_text(run: RunContext, reports: Sequence[SaveReport]) -> str | None:
    """What the saves of a run have come to, when it ends; None: there was none."""
    committed = [report for report in reports if report.outcome == "committed"]
    if not committed:
        return None
    durable = [report for report in reports if not report.memory]
    done = [report for report in committed if not report.memory]
    by = "" if run.ranks.world_size == 1 else f" by rank {run.ranks.rank}"
    lost, waits = sum(report.lost_s for report in reports), sum(report.stall_s for report in reports)
    reused = sum(report.reused for report in done)
    also = f" written and {amount(reused)} reused" if reused else ""
    more = f"; ckpt report {shlex.quote(shown_path(run.root))} shows more" if run.events.is_recorded else ""
    saved = f"saved {_counted(len(done))}{_missing(len(durable) - len(done))}: "
    saved += f"{amount(sum(report.bytes for report in done))}{also}{by}, "
    snapshots = len(committed) - len(done)
    missing = _missing(len(reports) - len(durable) - snapshots)
    kept = f"kept {snapshots} {'snapshot' if snapshots == 1 else 'snapshots'} in memory{missing}, " if snapshots else ""
    return (
        f"{saved if durable else ''}{kept}{lost:.2f} s of training time lost "
        f"(waits {waits:.2f} s, slower steps {max(lost - waits, 0):.2f} s){more}"
    )


def _missing(saves: int) -> str:
    return f" ({saves} failed or skipped)" if saves else ""


def shown_path(root: str) -> str:
    """A path below the current folder as one would type it there."""
    if is_url(root):
        return root
    try:
        relative = os.path.relpath(root)
    except OSError:  # the current folder was deleted
        return root
    return root if relative.startswith(os.pardir) else relative


def _listed(place: RunContext) -> dict[int, float]:
    """The steps of checkpoints that have a manifest, and when it was written."""
    found = {}
    for name in place.fs.names(place.root):
        step, path = place.names.step(name), os.path.join(place.root, name, MANIFEST)
        if step is not None and place.fs.exists(path):
            found[step] = place.fs.modified(path)
    return found


def _counted(checkpoints: int) -> str:
    return "1 checkpoint" if checkpoints == 1 else f"{checkpoints} checkpoints"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
