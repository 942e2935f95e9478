"""Axolotl: a plugin that has the checkpoints of its Trainer written in the background.

plugins:
- ckpt_component.integrations.axolotl.Plugin
ckpt_preset: async_persistent                   # if you like
ckpt_overrides: [checkpoint.writer.workers=4]
"""

from __future__ import annotations

from typing import Any

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as error:
    raise ImportError(
        f"ckpt_component.integrations.axolotl needs axolotl ({error}): pip install 'axolotl>=0.19'"
    ) from error

from .transformers import CheckpointCallback


class Args(BaseModel):  # type: ignore[misc, unused-ignore]
    """The keys of this plugin in Axolotl's config.

    Attributes:
        ckpt_preset: a preset's name
        ckpt_overrides: as for `build_manager`
    """

    ckpt_preset: str = "async_persistent"
    ckpt_overrides: list[str] = []


class Plugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """Gives `CheckpointCallback` to Axolotl's Trainer, which decides the rest, as `transformers.Trainer` does."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the keys of this plugin."""
        return f"{Args.__module__}.{Args.__qualname__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[CheckpointCallback]:
        """The callback; given before the Trainer is built, because it then waits for the writer of a killed run.

        Raises:
            CheckpointConfigError: the config is wrong, or an override is for something that the Trainer decides
        """
        return [CheckpointCallback(cfg.ckpt_preset or "async_persistent", cfg.ckpt_overrides or ())]
