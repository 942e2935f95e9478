"""Build the listeners of `checkpoint.listeners`: ours by name, others by `_target_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..events import CheckpointListener
from ..spelling import invalid_choice
from .errors import HydraConfigError
from .parts import build_part

#: Name in `checkpoint.listeners` -> class.
LISTENERS = {
    "tensorboard": "ckpt_component.events.tensorboard.TensorBoardListener",
    "wandb": "ckpt_component.events.wandb.WandbListener",
    "mlflow": "ckpt_component.events.mlflow.MlflowListener",
    "opentelemetry": "ckpt_component.events.opentelemetry.OpenTelemetryListener",
}


def build_listeners(entries: Sequence[Any]) -> list[CheckpointListener]:
    """Build the listeners of a config.

    Raises:
        CheckpointConfigError: an entry is no listener, or its package is not installed.
    """
    listeners = []
    for number, entry in enumerate(entries):
        if isinstance(entry, str) and entry not in LISTENERS:
            raise HydraConfigError(invalid_choice("checkpoint.listeners", entry, list(LISTENERS)))
        if not isinstance(entry, (str, Mapping)):
            raise HydraConfigError(
                f"checkpoint.listeners has {entry!r:.200}; give names ({', '.join(LISTENERS)}) or dicts with _target_. "
                "An object is passed to manager.add_listener()."
            )
        plain = {"_target_": LISTENERS[entry]} if isinstance(entry, str) else entry
        listeners.append(build_part(f"listeners.{number}", plain, CheckpointListener))
    return listeners
