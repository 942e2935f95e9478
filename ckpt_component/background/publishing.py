"""The run's side of publishing: which of its checkpoints become versions for inference, one at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..config.schema import Publish
from ..core.commit.names import StepNames, step_in_name
from ..core.outside import OUTSIDE, Outside
from ..core.storage.space import amount
from ..errors import CheckpointError
from ..events import SaveReport
from ..exporting.export import ExportOptions
from ..publishing.publisher import PublishOptions
from .jobs import Follower, RequestQueue

logger = logging.getLogger(__name__)

_PROCESS = "ckpt_component.background.publish_process"


@dataclass(frozen=True)
class PublishPolicy:
    """What to publish, and where to. The process gets it as JSON.

    Attributes:
        options: how
        to: absolute path or URL of the folder of the versions
        mirror: absolute path of the copy of the newest weights
        run: token of the run, by which it owns `root` and `to`
        root: path or URL of the folder of the checkpoints
        names: how steps are named there
        storage: arguments of `storage_at`
    """

    options: PublishOptions
    to: str
    mirror: str
    run: str
    root: str
    names: StepNames
    storage: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: dict[str, Any]) -> PublishPolicy:
        """The policy that `dataclasses.asdict` took apart."""
        options, names = values["options"], StepNames(**values["names"])
        export = ExportOptions(**options["export"])
        return cls(**{**values, "names": names, "options": PublishOptions(**{**options, "export": export})})


class BackgroundPublishing(Follower):
    """Publishes the weights of checkpoints that were committed. A failure is a warning, and never stops the run.

    While a version is made, only the newest request waits: receivers want the newest weights, and not all of them.

    Args:
        settings: when to publish, and how long that may take
        policy: what to publish
        note: records an event, from the thread of the versions
        outside: of the run
        from_memory: whether snapshots in memory are published too
    """

    def __init__(
        self,
        settings: Publish,
        policy: PublishPolicy,
        note: Callable[[dict[str, Any]], None],
        outside: Outside = OUTSIDE,
        *,
        from_memory: bool,
    ) -> None:
        self._settings, self._policy, self._note, self._outside = settings, policy, note, outside
        self._from_memory = from_memory
        setting = "checkpoint.publish.timeout"
        self._requests = RequestQueue(_PROCESS, "ckpt-publish", self._publish, settings.timeout, setting, outside)
        self._job = asdict(policy)
        #: Commits and snapshots come on different threads.
        self._lock = outside.lock()
        #: The newest step that was seen, how many were, and the one that was published last.
        self._step, self._seen, self._published = -1, 0, -1
        #: The newest commit to storage, and what was requested last.
        self._newest: SaveReport | None = None
        self._requested: SaveReport | None = None
        #: Steps that were due since the one that was published last.
        self._due: list[int] = []
        self._is_failing = self._is_fenced = False

    def start(self, step: int = 0) -> None:
        """The run begins after `step`."""
        self._step = self._published = step - 1

    def on_commit(self, report: SaveReport) -> None:
        """Publish a checkpoint, if it is due. Does not wait."""
        self._newest = report
        self._see(report)

    def on_kept(self, report: SaveReport) -> None:
        """Publish a snapshot in memory, if it is due; when it goes to storage too, it is not due again."""
        if self._from_memory:
            self._see(report)

    def in_use(self) -> set[str]:
        """The checkpoints that are or will be published, which must not be deleted."""
        return self._requests.in_use()

    def end(self, *, finish: bool) -> None:
        """Publish the newest checkpoint and wait for it, or end the process that runs. Bounded by its deadline.

        Args:
            finish: the run has come to its end
        """
        newest, began = self._newest, self._outside.now()
        if finish and newest is not None and newest is not self._requested:  # memory has gone with its server
            self._request(newest)
        self._requests.end(finish=finish)
        if finish and newest is not None and self._is_failing and self._outside.now() - began < self._settings.timeout:
            self._request(newest)  # no commit follows with which it could be tried again
            self._requests.end(finish=True)

    def _see(self, report: SaveReport) -> None:
        """Count a checkpoint, in memory or in storage, and publish it if it is the n-th, or the last one failed."""
        step = report.step or 0
        with self._lock:
            if step < self._step:  # it was in memory long before it is in storage
                return
            is_new, self._step = step > self._step, step
            self._seen += is_new
            is_due = is_new and self._seen % self._settings.every == 0
            if is_due:
                self._due.append(step)
            if is_due or self._is_failing:
                self._request(report)

    def _request(self, report: SaveReport) -> None:
        if not self._is_fenced:
            self._requested = report
            self._requests.add(report)

    def _publish(self, report: SaveReport) -> None:
        """On the thread: publish a checkpoint, and record what became of it."""
        path, started = report.path, self._outside.date()
        step = report.step or step_in_name(os.path.basename(path)) or 0
        if self._is_fenced or step <= self._published:  # the same step, from memory
            return
        outcome: dict[str, Any]
        try:
            answer = self._requests.run({"policy": self._job, "source": path})
        except Exception as error:  # whatever it is, later checkpoints are published
            expected = isinstance(error, (CheckpointError, OSError, ValueError))
            if self._is_failing:
                logger.info("%s was not published either: %s", path, error)
                return
            self._is_failing = True
            text = "%s was not published to %s, and the run continues; the next checkpoint is tried: %s"
            logger.warning(text, path, self._policy.to, error, exc_info=not expected)
            outcome = {"outcome": "failed", "error": str(error)}
        else:
            for warning in answer.get("warnings", ()):
                logger.warning("publishing to %s: %s", self._policy.to, warning)
            if "gone" in answer:
                logger.info("%s is not published: its snapshot servers have ended", path)
                return
            if "fenced" in answer:
                self._is_fenced = True
                logger.warning("publishing has stopped: %s", answer["fenced"])
                outcome = {"outcome": "failed", "error": answer["fenced"]}
            else:
                outcome = self._published_event(answer)
        event = {"event": "publish", "time": round(started, 6), "step": step, "path": path}
        self._note({**event, **outcome})

    def _published_event(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """What the event of a version says."""
        step, version, target = answer["step"], answer["version"], answer["path"]
        lag = max(self._outside.date() - answer["committed"], 0.0)
        with self._lock:
            skipped = sum(due < step for due in self._due)
            self._due = [due for due in self._due if due > step]
            self._is_failing, self._published = False, step
        size, whole = amount(answer["nbytes"]), amount(answer["whole_nbytes"])
        kind = "whole" if answer["is_whole"] else f"delta of {whole}"
        text = "step %d published: version %d (%s), %s in %.1f s, %.1f s after its commit, %s"
        logger.info(text, step, version, kind, size, answer["seconds"], lag, target)
        return {
            "step": step,
            "path": answer["source"],
            "outcome": "published",
            "target": target,
            "version": version,
            "whole": answer["is_whole"],
            "bytes": answer["nbytes"],
            "whole_bytes": answer["whole_nbytes"],
            "seconds": round(answer["seconds"], 6),
            "lag": round(lag, 6),
            "skipped": skipped,
        }
