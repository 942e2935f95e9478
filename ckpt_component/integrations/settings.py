"""The settings of an adapter: those of a config, without what its framework decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..config.hydra.compose import checked_overrides
from ..config.hydra.resolve import resolve_config
from ..config.schema import Checkpoint
from ..errors import CheckpointConfigError
from ..formats.writer import Writer


def refuse_decided(overrides: Sequence[str], decided: Mapping[str, str]) -> list[str]:
    """Return the overrides; refuse one for a key that the framework decides.

    Args:
        overrides: as for `build_manager`
        decided: for each key, or group such as `checkpoint/writer`, what to do instead

    Raises:
        CheckpointConfigError: an override is for such a key, or the overrides are one string
    """
    for text in checked_overrides(overrides):
        for key, instead in decided.items():
            if str(text).lstrip("+").startswith((f"{key}=", f"{key}.")):
                raise CheckpointConfigError(f"{text} has no effect here; {instead}.")
    return list(overrides)


def settings_of(
    checkpoint: Any, overrides: Sequence[str], decided: Mapping[str, str], writer: type[Writer]
) -> Checkpoint:
    """Resolve the config of an adapter.

    Args:
        checkpoint: a preset's name, a config or a dict, as for `build_manager`
        overrides: as for `build_manager`
        decided: as for `refuse_decided`
        writer: writes the framework's files; takes the options of the configured writer, such as `workers`

    Raises:
        CheckpointConfigError: the config is wrong, or an override has no effect
    """
    settings = resolve_config(checkpoint, overrides)
    refuse_decided(overrides, decided)
    names = {field.name for field in fields(writer)}
    options = {key: value for key, value in settings.writer.items() if key in names}
    settings.writer = {**options, "_target_": f"{writer.__module__}.{writer.__qualname__}"}
    return settings
