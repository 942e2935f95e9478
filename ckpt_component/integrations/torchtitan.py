"""torchtitan: its checkpoint manager, with saves by this package. One flag of torchtitan's own picks it.

It is `--override.imports ckpt_component.integrations.torchtitan.checkpoint`, beside `--checkpoint.enable`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import CheckpointConfigError
from ..factory.graph import build_manager
from .settings import refuse_decided

try:
    from torchtitan.components.checkpointer import MODEL, CheckpointManager
    from torchtitan.config.override import derive, override
except ImportError as error:
    raise ImportError(
        f"ckpt_component.integrations.torchtitan needs torchtitan 0.3 or newer: pip install 'torchtitan>=0.3' ({error})"
    ) from error

logger = logging.getLogger(__name__)

_DECIDED = {
    "checkpoint.dir": "use --checkpoint.folder",
    "checkpoint.naming": "torchtitan names its folders step-<step>",
    "checkpoint.save": "use --checkpoint.interval",
    "checkpoint.keep.last": "use --checkpoint.keep_latest_k",
    "checkpoint.resume": "use --checkpoint.load_step",
    "checkpoint/writer": "torchtitan reads the files of the dcp writer only",
}


class TorchTitanCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager, on top of `ckpt_component.CheckpointManager`, which saves and resumes.

    The keys of torchtitan's config keep their meaning, except that `async_mode` has none: the preset says how to save.
    Folders keep their names, `step-200`, and their format, so that a run of stock torchtitan continues with this one,
    and the other way round. What is in Hugging Face's format is loaded and saved by torchtitan itself.

    A signal such as SIGTERM or SIGUSR1 ends the run after a step that is saved, as `exit_if_stopped` says.

    Args:
        config: torchtitan's config, a preset's name, and overrides
        **parts: what torchtitan's trainer passes: model parts, optimizers, and others

    Raises:
        CheckpointConfigError: the preset or an override is wrong; with what to type instead
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The config of torchtitan's manager, and two keys of this package."""

        preset: str = "async_persistent"
        """A preset of ckpt_component, such as async_zero_overhead."""

        overrides: list[str] = field(default_factory=list)
        """As on a Hydra command line: checkpoint/stager=zero_overhead, checkpoint.writer.workers=4."""

        stop_on_signal: bool = True
        """Save and end the run at SIGTERM, SIGINT, SIGUSR1 and SIGUSR2. False: they end it at once, as elsewhere."""

    def __init__(self, config: Config, **parts: Any) -> None:
        changed: dict[str, Any] = {"async_mode": "disabled", "keep_latest_k": 0}  # no threads and memory of its own
        super().__init__(replace(config, **changed), **parts)
        overrides = refuse_decided(config.overrides, _DECIDED)
        if not getattr(self, "enable", True):
            logger.warning("nothing is saved or loaded, because checkpoint.enable is false: add --checkpoint.enable")
            return
        self._load_step = config.load_step
        keep, resume = config.keep_latest_k or "null", "auto" if config.load_step == -1 else config.load_step
        settings = [
            "checkpoint.naming=torchtitan",
            f"checkpoint.save.every_steps={'null' if config.load_only else config.interval}",
            "checkpoint.save.at_end=false",
            f"checkpoint.keep.last={keep}",
            f"checkpoint.resume={resume}",
        ]
        self._manager = build_manager(config.preset, [*settings, *overrides], dir=self.folder)
        self._stops = config.stop_on_signal and not config.load_only
        if self._stops:
            self._manager.stop_on_signal()

    def load(self, step: int = -1) -> bool:
        """Resume from `step`, or from the newest good checkpoint; else load what the `initial_*` keys name.

        Raises:
            CheckpointError: see `ckpt_component.CheckpointManager.restore`
        """
        if not getattr(self, "enable", True):
            return False
        if step != self._load_step:
            raise CheckpointConfigError(
                f"load({step}) differs from checkpoint.load_step={self._load_step}; set that key."
            )
        steps = self._manager.steps()
        stock = -1 if steps else self._find_load_step()
        if stock != -1:  # a run that torchtitan's own manager began
            super().load(step)
            self._manager.begin_at(stock if step == -1 else step)
            return True
        # Step 0 is torchtitan's seed checkpoint, which holds the model alone.
        state = self._states_to_load(model_only=(steps == [0] if step == -1 else step == 0))
        if self._manager.restore(state) is None:
            return bool(super().load(step))
        self.states[MODEL].load_state_dict(state)
        return True

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """Save the last step, which may be the model alone, and wait until it is committed."""
        if kwargs.get("to_hf"):
            return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        self._manager.save(int(checkpoint_id.rpartition("-")[2]), state_dict)
        return self._manager.wait()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        due = bool(self._should_save(curr_step, last_step))
        stopped = self._stops and self._manager.should_stop()
        if due and last_step:
            self._save_last_step(curr_step)
        elif due or stopped:
            self._manager.save(curr_step, self._flattened_model_states_sd())
            if stopped:
                self._manager.close()
                self._manager.exit_if_stopped()
        return due

    def _maybe_wait_for_staging(self) -> None:
        self._manager.wait_staged()

    def _close(self) -> None:
        self._manager.close()

    def __del__(self) -> None:
        """Leave to the end of the process what was not closed; torchtitan's own method would wait here."""


@override(target=CheckpointManager.Config, description="checkpoints by ckpt_component")
def checkpoint(
    config: CheckpointManager.Config, preset: str = "async_persistent", overrides: Sequence[str] = ()
) -> TorchTitanCheckpointManager.Config:
    """The override that `--override.imports ckpt_component.integrations.torchtitan.checkpoint` names.

    With arguments: `'ckpt_component.integrations.torchtitan.checkpoint={"preset": "async_zero_overhead"}'`.

    Args:
        config: the node `checkpoint` of the trainer's config
        preset: see `TorchTitanCheckpointManager.Config`
        overrides: see there
    """
    derived: TorchTitanCheckpointManager.Config = derive(
        config, TorchTitanCheckpointManager.Config, preset=preset, overrides=overrides
    )
    return derived
