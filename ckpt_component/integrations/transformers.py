"""The `Trainer` of transformers: with one callback, its checkpoints are written in the background.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[CheckpointCallback()])

Trainer still decides when to save, what is in a checkpoint, which ones to keep, and where to resume: the folders are
those that it would write itself, with `manifest.json` and checksums beside its files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import sort_checkpoints
except ImportError as error:
    raise ImportError(
        f"ckpt_component.integrations.transformers needs transformers 5 or newer ({error}): "
        "pip install 'transformers>=5' 'accelerate>=1.1'"
    ) from error

from ..core.commit.cleanup import discard, wait_for_writers
from ..core.commit.names import HUGGINGFACE
from ..core.options import Naming
from ..core.storage.locate import file_storage
from ..errors import CheckpointConfigError, CheckpointTypeError
from ..events import CheckpointListener, SaveReport
from ..factory.graph import build_manager
from ..formats.named_files import FilesWriter
from ..managing.manager import CheckpointManager
from .file_capture import FileCapture
from .settings import settings_of

_DECIDED = {
    "checkpoint.dir": "use TrainingArguments(output_dir=...)",
    "checkpoint.naming": "Trainer names its folders checkpoint-<step>",
    "checkpoint.save": "use TrainingArguments(save_strategy=..., save_steps=...)",
    "checkpoint.keep": "use TrainingArguments(save_total_limit=...)",
    "checkpoint.resume": "use trainer.train(resume_from_checkpoint=...)",
    "checkpoint/writer": "the files are those of Trainer",
}
#: A file that Trainer puts into the new folder before a save that a signal asks for (enable_jit_checkpoint).
_STARTED = "checkpoint-is-incomplete.txt"


class CheckpointCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Writes the checkpoints of a `Trainer` in the background, atomically and with checksums.

    Args:
        checkpoint: a preset's name, a config or a dict, as for `build_manager`. What Trainer decides is ignored in it:
            dir, naming, save, keep, resume and the writer's format.
        overrides: as for `build_manager`

    Raises:
        CheckpointConfigError: the config is wrong, or an override is for something that Trainer decides
    """

    def __init__(self, checkpoint: Any = "async_persistent", overrides: Sequence[str] = ()) -> None:
        settings = settings_of(checkpoint, overrides, _DECIDED, FilesWriter)
        settings.naming, settings.keep.last, settings.keep.every_steps = Naming.huggingface, None, None
        self._settings = settings
        self._manager: CheckpointManager | None = None
        #: The best checkpoint at the time of each save, which must survive what that save deletes.
        self._best: dict[int, str | None] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the writer of a killed run, so that Trainer then finds its last checkpoint."""
        fs, root = file_storage(), os.path.abspath(args.output_dir)
        wait_for_writers(fs, root, HUGGINGFACE, self._settings.timeouts.close)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over the saves of the calling Trainer."""
        self._end()
        trainer = _calling_trainer()
        _refuse_unsupported(trainer)
        if not self._settings.enabled:
            return
        manager = build_manager(self._settings, dir=args.output_dir)
        try:
            manager.begin_at(state.global_step)
            manager.guard(trainer.optimizer)
        except BaseException:
            manager.close()
            raise
        manager.add_listener(_Limit(args, self._best))
        self._manager = manager
        self._trainer, self._capture = trainer, FileCapture()
        self._save_by_trainer = trainer._save_checkpoint
        trainer._save_checkpoint = self._save_checkpoint

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Wait for the commits before Trainer loads the best model at the end."""
        if self._manager is not None and "train_runtime" in (logs or {}):
            self._manager.wait()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until all saves are committed."""
        self._end()

    def _end(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            vars(self._trainer).pop("_save_checkpoint", None)
            manager.close()

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Have Trainer write its checkpoint into memory, and save that; instead of `Trainer._save_checkpoint`."""
        trainer, manager = self._trainer, self._manager
        if manager is None:
            self._save_by_trainer(model, trial)
            return
        state, root = trainer.state, trainer._get_output_dir(trial=trial)
        target = os.path.join(root, HUGGINGFACE.folder(state.global_step))

        def write(folder: str) -> None:
            trainer._get_output_dir = lambda trial: os.path.dirname(folder)
            try:
                self._save_by_trainer(model, trial)
            finally:
                del trainer._get_output_dir
            # Trainer set the path of the best checkpoint, if this is the best one, to that of the temporary folder.
            best = os.path.join(root, HUGGINGFACE.folder(state.best_global_step or 0))
            if state.best_global_step and (best == target or os.path.isdir(best)):
                state.best_model_checkpoint = best
            if trainer.args.should_save:
                state.save_to_json(os.path.join(folder, "trainer_state.json"))

        files = self._capture.files_of(write, os.path.basename(target))
        self._best[state.global_step] = state.best_model_checkpoint
        if trainer.args.should_save and os.path.isdir(target) and os.listdir(target) == [_STARTED]:
            discard(file_storage(durable=False), target)
        manager.save(state.global_step, files)
        files.clear()  # the manager keeps it, and it may hold tensors that were gathered for this save alone


class _Limit(CheckpointListener):
    """Deletes old checkpoints as Trainer does (`save_total_limit`), but each at once: never the newest and the best."""

    def __init__(self, args: Any, best: dict[int, str | None]) -> None:
        self._args = args
        self._best = best

    def on_committed(self, report: SaveReport) -> None:
        """Delete what the new checkpoint makes superfluous."""
        if report.memory:
            return
        args, best = self._args, self._best.pop(report.step or 0, None)
        if not args.should_save or not args.save_total_limit or args.save_total_limit < 0:
            return
        paths = sort_checkpoints(os.path.dirname(report.path))
        kept = {paths[-1], *(path for path in paths if best and os.path.samefile(path, best))}
        surplus = len(paths) - max(args.save_total_limit, len(kept))
        for path in [path for path in paths if path not in kept][: max(surplus, 0)]:
            discard(file_storage(), path)


def _calling_trainer() -> Any:
    """The Trainer that calls this callback. It passes its parts, but only it knows the files of a checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise CheckpointTypeError("CheckpointCallback is for transformers.Trainer; in another loop, use build_manager.")


def _adapter_folders(model: Any) -> list[str]:
    """The adapters of a PEFT model that it saves in a folder of their own."""
    peft = sys.modules.get("peft")  # a model of PEFT has imported it
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return []
    return [name for name in model.peft_config if name != "default"]


def _refuse_unsupported(trainer: Any) -> None:
    """Raise CheckpointConfigError for a Trainer whose checkpoints are not written by it alone."""
    args, problem = trainer.args, None
    if trainer.is_deepspeed_enabled:
        problem = "DeepSpeed writes its own checkpoints; leave out CheckpointCallback"
    elif trainer.is_fsdp_enabled and "FULL" not in str(trainer.accelerator.state.fsdp_plugin.state_dict_type):
        problem = "FSDP writes sharded checkpoints itself; set fsdp_config's state_dict_type to FULL_STATE_DICT"
    elif args.save_on_each_node and args.world_size > 1:
        problem = "save_on_each_node=True has several ranks write the same files; set it to False"
    elif args.push_to_hub and args.hub_strategy != "end":
        problem = f"hub_strategy={args.hub_strategy} pushes unfinished checkpoints; set it to 'end'"
    elif trainer.hp_search_backend is not None:
        problem = "hyperparameter_search has a folder for each trial; leave out CheckpointCallback"
    elif folders := _adapter_folders(trainer.accelerator.unwrap_model(trainer.model)):
        problem = (
            f"PEFT writes the adapter {folders[0]!r} into a subfolder, and only plain files are saved; name a single "
            "adapter 'default', or leave out CheckpointCallback"
        )
    elif "_save_checkpoint" in vars(trainer):
        problem = "it has another CheckpointCallback; leave one of them out"
    if problem is not None:
        raise CheckpointConfigError(f"CheckpointCallback cannot save this Trainer's checkpoints: {problem}.")
