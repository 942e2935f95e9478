"""The settings of an adapter: those of a config, without what its framework decides."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any

from ..config.hydra.compose import checked_overrides
from ..config.hydra.resolve import resolve_config
from ..config.schema import Checkpoint
from ..errors import CheckpointConfigError
from ..formats.writer import Writer

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _package() -> ModuleType:
    """The package that is imported already, else the first that is installed: their classes are not exchangeable."""
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("ckpt_component.integrations.lightning needs Lightning: pip install 'lightning>=2.6' numpy")


PACKAGE = _package()


def fabric(name: str) -> ModuleType:
    """A module of the lower half of the package: `utilities` for `lightning.fabric.utilities`."""
    lower = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    return import_module(f"{lower[PACKAGE.__name__]}.{name}")


def part(name: str) -> ModuleType:
    """A module of the package: `callbacks` for `lightning.pytorch.callbacks`."""
    return import_module(f"{PACKAGE.__name__}.{name}")


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
