"""Lightning's own `.ckpt` files, written in the background: `Trainer(plugins=[BackgroundCheckpointIO()])`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..checkpointer import Checkpointer
from ..core.commit.cleanup import Unfinished
from ..core.commit.names import MEGATRON
from ..core.storage.locate import file_storage
from ..errors import CheckpointConfigError, CheckpointError, CheckpointTypeError
from ..factory.graph import build_checkpointer
from ..formats.foreign import verify_torch_file
from ..formats.torch_save import TorchFileWriter, file_state
from ..saving.save_queue import SaveHandle
from .lightning_package import part
from .settings import settings_of

logger = logging.getLogger(__name__)

_DECIDED = {
    "checkpoint.dir": "use ModelCheckpoint(dirpath=...)",
    "checkpoint.naming": "use ModelCheckpoint(filename=...)",
    "checkpoint.save": "use ModelCheckpoint(every_n_train_steps=...)",
    "checkpoint.keep": "use ModelCheckpoint(save_top_k=...)",
    "checkpoint.resume": "use Trainer.fit(ckpt_path=...)",
    **dict.fromkeys(["checkpoint.rewind", "checkpoint.overlap", "checkpoint.commit"], "it is for CheckpointCallback"),
    "checkpoint/writer": "the files are those of Lightning",
}


class BackgroundCheckpointIO(part("plugins.io").TorchCheckpointIO):  # type: ignore[misc]
    """Writes `.ckpt` files from a background process, each whole or not at all.

    `ModelCheckpoint` decides when, where and which to keep. `Trainer.fit(ckpt_path=...)`, `load_from_checkpoint` and
    `torch.load` read the files. An old file is deleted only when the save that followed it is durable. A failed save
    raises its error once, at the next save or at the end of `fit`.

    Args:
        checkpoint: a preset that copies the state when it saves (`async_persistent`, `async_temporal`), or `sync`; or a
            config node
        overrides: as for `build_checkpointer`

    Raises:
        CheckpointConfigError: the config is wrong, or has no meaning here
    """

    def __init__(self, checkpoint: Any = "async_persistent", overrides: Sequence[str] = ()) -> None:
        settings = settings_of(checkpoint, overrides, _DECIDED, TorchFileWriter)
        if not settings.enabled or "ZeroOverheadStager" in str(settings.stager.get("_target_")):
            problem = "copies tensors after the save has returned" if settings.enabled else "saves nothing"
            raise CheckpointConfigError(
                f"BackgroundCheckpointIO cannot use a config that {problem}; use 'async_persistent', 'async_temporal' "
                "or 'sync'."
            )
        self._settings = settings
        self._checkpointer: Checkpointer | None = None
        self._newest: SaveHandle | None = None
        self._swept: set[str] = set()

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy the checkpoint now, and write it to the file `path` in the background.

        Raises:
            CheckpointStageError: the checkpoint cannot be pickled
            CheckpointConfigError: the path is in a bucket
            CheckpointError: the save could not begin, or an earlier one failed and its error was not raised yet
        """
        if storage_options is not None:
            raise CheckpointTypeError(
                f"storage_options={storage_options!r:.100} is for remote storage, and BackgroundCheckpointIO "
                "writes local or mounted files; leave it out."
            )
        if self._checkpointer is None:  # again after `teardown`
            self._checkpointer = build_checkpointer(self._settings, alone=True)
        self._sweep(os.path.dirname(os.path.abspath(path)))
        saved = self._checkpointer.save(file_state(checkpoint), path)
        self._newest = saved[1] if saved is not None else None  # type: ignore[assignment]

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as Lightning does, after all saves have ended and the checksums in the file are verified."""
        self.wait()
        if os.path.isfile(path):
            verify_torch_file(file_storage(), os.path.realpath(path))
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint when the save before this call is durable; keep it if that save fails."""
        if self._newest is None:
            super().remove_checkpoint(path)
        else:
            self._newest.add_done_callback(partial(self._remove_after, path))

    def _remove_after(self, path: Any, save: Any) -> None:
        if save.report.outcome != "committed":
            logger.warning("%s is kept, although it should be deleted, because %s was not saved", path, save.path)
            return
        try:
            super().remove_checkpoint(path)
        except OSError as error:
            logger.warning("%s could not be deleted: %s", path, error)

    def wait(self) -> None:
        """Wait until every save that was started is durable, or raise the error of one that failed."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def teardown(self) -> None:
        """Finish the saves and stop the writer process. The Trainer calls this at the end of each `fit`."""
        checkpointer, self._checkpointer, self._newest = self._checkpointer, None, None
        if checkpointer is None:
            return
        cause = sys.exc_info()[1]
        try:
            checkpointer.close()
        except CheckpointError as error:
            if cause is None:
                raise
            # The Trainer is about to raise another exception, which this one must not hide.
            logger.error("while closing BackgroundCheckpointIO: %s", error)

    def _sweep(self, folder: str) -> None:
        """Once per folder: delete the unfinished files of dead runs."""
        if folder in self._swept or "://" in folder:
            return
        self._swept.add(folder)
        for name in Unfinished(file_storage(), folder, MEGATRON).sweep():
            logger.info("deleted %s, which a dead run left", os.path.join(folder, name))
