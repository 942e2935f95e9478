"""What differs between the config of a run and that of the checkpoint from which it resumes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckpt_component.core.commit.run_record import stored_config
from ckpt_component.errors import CheckpointError

from .schema import Settings, read

logger = logging.getLogger(__name__)

#: What a run may change and still be the same run: how far and where it trains, how it ends, and what it reports.
#: Every other key changes shapes, data or schedule. Not among the settings at all: `checkpoint` and Hydra's own keys.
UNIMPORTANT = frozenset(
    {
        *("train.steps", "train.device", "train.threads", "train.timeout", "train.requeue_exit_code"),
        *("train.log_every", "train.eval_every", "train.eval_batches"),
    }
)
_GROUPS = ("train", "data", "model")


def warn_of_changes(path: str, settings: Settings) -> None:
    """Name the keys that mean another run than that of a checkpoint, in one warning.

    Args:
        path: the checkpoint; one line says so if it does not have the config of such a run
        settings: of this run
    """
    try:
        tree = stored_config(path).resolved
        if not all(isinstance(tree.get(key), dict) for key in _GROUPS):
            logger.info("%s is not of this program, so its config is not compared", path)
            return
        before = dict(_values(read(OmegaConf.create(tree))))
    except (CheckpointError, OmegaConfBaseException) as error:
        logger.info("the config of this run is not compared with that of the checkpoint: %s", error)
        return
    changed = [
        f"{key} {before[key]} -> {value}"
        for key, value in _values(settings)
        if key not in UNIMPORTANT and before[key] != value
    ]
    if changed:
        logger.warning(
            "this run has other settings than the checkpoint %s (then -> now): %s",
            os.path.basename(path),
            ", ".join(changed),
        )


def _values(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """All dotted keys with their values, as they are typed."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{item.name}.")
        elif isinstance(value, Enum):
            yield f"{prefix}{item.name}", str(value.value)
        else:
            yield f"{prefix}{item.name}", "null" if value is None else str(value)
