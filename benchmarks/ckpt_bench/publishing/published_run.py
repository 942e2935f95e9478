"""A run that saves weights after each step, without training them, and publishes or exports a checkpoint when asked."""

from __future__ import annotations

import os
from dataclasses import asdict

from ckpt_component import build_checkpointer
from ckpt_component.background.publishing import PublishPolicy
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.exporting.export import ExportOptions
from ckpt_component.publishing.publisher import PublishOptions

from ..measure.target_files import fill_cache, remove
from .background_work import Work, work_in_background
from .changing_weights import ChangingWeights

_PUBLISH = "ckpt_component.background.publish_process"
_EXPORT = "ckpt_component.background.export_process"
#: Whole versions are asked for by a new mirror; none comes by itself.
_WHOLE_EVERY = 1_000_000
_KEEP = 100


class PublishedRun:
    """See the top of this file. A context manager.

    Args:
        state: name of the state
        folder: for checkpoints, versions and the mirror; empty before

    Attributes:
        weights: what is saved
        to: the folder of the versions
        mirror: the folder of the mirror
        path: the newest checkpoint
    """

    def __init__(self, state: str, folder: str) -> None:
        self.weights = ChangingWeights(state)
        self.to, self.mirror = os.path.join(folder, "weights"), os.path.join(folder, "mirror")
        self.path, self._step, self._root = "", 0, os.path.join(folder, "run")
        self._exported = os.path.join(folder, "exported")
        os.mkdir(self._root)
        owner = FencingToken(file_storage(), self._root)
        owner.acquire()
        options = PublishOptions(ExportOptions("hf"), delta="auto", whole_every=_WHOLE_EVERY, keep=_KEEP)
        self._policy = PublishPolicy(
            options,
            to=self.to,
            mirror=self.mirror,
            run=owner.token,
            root=self._root,
            names=MEGATRON,
            storage={"durable": True, "atomic_rename": True, "options": {}},
        )
        self._checkpointer = build_checkpointer("sync", alone=True)

    def __enter__(self) -> PublishedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(self) -> None:
        """Save the next step, whose weights differ from those of the last one, and delete the checkpoint before it."""
        before, self._step = self.path, self._step + 1
        if before:
            self.weights.step()
        self.path = os.path.join(self._root, MEGATRON.folder(self._step))
        self._checkpointer.save(self.weights.content, self.path)
        if before:
            remove(before)

    def settle(self) -> None:
        """Have all files written back, and what is read next in the page cache."""
        os.sync()
        for path in filter(os.path.exists, (self.path, self.mirror)):
            fill_cache(path)

    def publish(self) -> Work:
        """Publish the newest checkpoint."""
        return work_in_background(_PUBLISH, {"policy": asdict(self._policy), "source": self.path})

    def export(self) -> Work:
        """Export the newest checkpoint whole, as a Hugging Face folder, and delete that again."""
        options = vars(ExportOptions("hf"))
        work = work_in_background(_EXPORT, {"source": self.path, "target": self._exported, "options": options})
        remove(self._exported)
        return work
