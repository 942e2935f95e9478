"""What is copied from the local folder of a run to its permanent one, by whom, and which checkpoint comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.commit.cleanup import BestPolicy, RetentionPolicy
from ..core.commit.manifest import hosts_of
from ..core.commit.names import StepNames
from ..core.commit.scan import Scan
from ..errors import CheckpointExistsError


@dataclass(frozen=True)
class UploadPolicy:
    """What to upload, where to, and how fast. The process of the uploads gets it as JSON.

    If each host has a local folder of its own, each has such a process, which sends the files of its host.

    Attributes:
        source: absolute path of the local folder (`local.dir`)
        target: path or URL of the permanent folder (`dir`)
        options: of the storage of the target, which may hold secrets
        durable: as for `storage_at`
        atomic_rename: as for `storage_at`, of the target
        names: how steps are named in both
        keep: which checkpoints to keep in the target
        best: how checkpoints are compared; None: they are not
        run: token of the run, which is in the manifests of its checkpoints, and by which it owns both folders
        began: the step that it began with; None: it is not known yet
        events: whether uploads are recorded beside the other events of the run
        every_steps: upload checkpoints whose step is a multiple, and the last one of the run; None: any
        max_bytes_per_second: None: no limit
        finish_seconds: how long uploads continue when the run has ended
        hosts: the hosts of the run, the leading rank's first; empty: they share one local folder
        host: the one of this process; empty: they share one
        rank: which records what this process does
        silent_seconds: how long the leading rank's host waits for another one that does not continue
        program: the module whose `main` uploads, in a process
    """

    source: str
    target: str
    names: StepNames
    keep: RetentionPolicy
    best: BestPolicy | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    durable: bool = True
    atomic_rename: bool = True
    run: str = ""
    began: int | None = None
    events: bool = False
    every_steps: int | None = None
    max_bytes_per_second: float | None = None
    finish_seconds: float = 300.0
    hosts: tuple[str, ...] = ()
    host: str = ""
    rank: int = 0
    silent_seconds: float = 120.0
    program: str = "ckpt_component.background.upload_process"

    @classmethod
    def of(cls, values: dict[str, Any]) -> UploadPolicy:
        """The policy that `dataclasses.asdict` took apart."""
        best = values["best"] and BestPolicy(**values["best"])
        names, keep = StepNames(**values["names"]), RetentionPolicy(**values["keep"])
        return cls(**{**values, "names": names, "keep": keep, "best": best, "hosts": tuple(values["hosts"])})

    @property
    def leads(self) -> bool:
        """Whether this process begins and commits uploads."""
        return self.host == (self.hosts or ("",))[0]

    def takes(self, manifest: Mapping[str, Any], step: int) -> bool:
        """Whether this process has files of a checkpoint to send.

        None if one of its hosts is not in this run; nor of a later step than the run began with that an earlier one has
        saved: it was not whole.
        """
        hosts = hosts_of(manifest)
        if self.began is not None and step > self.began and manifest.get("run") != self.run:
            return False
        return (self.host in hosts and {*self.hosts}.issuperset(hosts)) if hosts else self.leads

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be uploaded while the run continues."""
        return self.every_steps is None or step % self.every_steps == 0

    def next_step(self, local: Scan, remote: Scan, *, ended: bool) -> int | None:
        """Which checkpoint to upload now; None: all that are due are there.

        The newest comes first, so that those in between are skipped when uploads are slower than saves. Then come those
        that the target keeps forever and those that it keeps as the best, if they are still in the local folder.

        Args:
            local: scan of the local folder
            remote: scan of the target
            ended: whether the run has ended, so that its last checkpoint is due

        Raises:
            CheckpointExistsError: the target has later steps of another run, so that this run's would be the oldest
        """
        last = local.committed[-1:] if ended else []
        due = [step for step in local.committed if self.is_due(step) or step in last]
        missing = [step for step in due if step not in remote.committed]
        newest = max(remote.committed, default=-1)
        later = [step for step in missing if step > newest]
        if later:
            return later[-1]
        if missing and local.manifests[missing[-1]].get("run") == self.run != remote.manifests[newest].get("run"):
            raise CheckpointExistsError(
                f"{self.target} holds checkpoints up to step {newest} of another run, and this run has saved step "
                f"{missing[-1]}; restart it to continue from step {newest}, or give it a checkpoint.dir of its own."
            )
        metrics = {**remote.metrics, **{step: local.metrics[step] for step in missing}}
        best = [] if self.best is None else self.best.ranked(metrics)[: self.best.last]
        every = self.keep.every_steps
        kept = [step for step in missing if step in best or (every is not None and step % every == 0)]
        return kept[-1] if kept else None

    def to_delete(self, remote: Scan) -> list[int]:
        """The steps that the target no longer keeps."""
        metrics = {step: remote.metrics[step] for step in remote.committed}
        best = [] if self.best is None else self.best.ranked(metrics)[: self.best.last]
        return self.keep.to_delete(remote.committed, best)
