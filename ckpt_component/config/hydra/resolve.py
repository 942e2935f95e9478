"""Convert any form of config to the typed one that the factory reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...core.storage.locate import expanded
from ..rules import checked_resume
from ..schema import GROUPS, PARTS, Checkpoint, part_schema
from .checks import (
    HYDRA_KEYS,
    refuse_bad_dir,
    refuse_bad_options,
    refuse_bad_peers,
    refuse_bad_publish,
    refuse_bad_rename,
    refuse_bad_tiers,
    refuse_built,
    refuse_contradictions,
    refuse_missing,
    refuse_text_parts,
    refuse_unknown_keys,
    refuse_unknown_part_keys,
    refuse_whole_app,
)
from .compose import checked_overrides, compose_checkpoint, compose_option, plain_dict
from .explain import dotted_keys, unknown_group, unknown_key
from .hydra_errors import HydraConfigError, for_hydra
from .overrides import parse_override
from .read import omegaconf_text, read

_GROUPS = {f"checkpoint/{name}": options for name, options in GROUPS.items()}


def resolve_config(
    config: DictConfig | Mapping[str, Any] | Checkpoint | str, overrides: Sequence[str] = ()
) -> Checkpoint:
    """Check a config and convert its values. Builds nothing, and does not modify the input.

    Args:
        config: a preset's name, the config below `checkpoint` as a DictConfig or dict, or a result of this function
        overrides: applied to it: `checkpoint.writer.workers=4` sets a value, `checkpoint/stager=pinned` swaps a part

    Returns:
        The config with real enums. `stager`, `caller` and `writer` are plain dicts with `_target_` and, for
        our own parts, every key; their enums are strings, which `build_part` converts.

    Raises:
        CheckpointConfigError: there are unknown keys, missing keys, a part set to a string, or a value that has a
            wrong type, is out of range, or contradicts another; checked in this order
    """
    overrides = checked_overrides(overrides)
    if isinstance(config, str):
        config, overrides = compose_checkpoint(config, overrides), []
    tree = _override(_plain(config), overrides)
    refuse_whole_app(tree)
    refuse_unknown_keys(tree)
    refuse_missing(tree)
    refuse_text_parts(tree)
    parts = {kind: dict(tree.pop(kind, {})) for kind in PARTS}
    for kind, part in parts.items():
        refuse_unknown_part_keys(kind, part)

    checkpoint = read(Checkpoint, {**tree, **{kind: {} for kind in PARTS}}, "checkpoint")
    refuse_bad_dir(checkpoint.dir)
    refuse_bad_options(checkpoint.storage.options)
    refuse_bad_rename(checkpoint.load.rename)
    refuse_bad_rename(checkpoint.export.rename, "checkpoint.export.rename")
    refuse_bad_rename(checkpoint.publish.rename, "checkpoint.publish.rename")
    refuse_bad_peers(checkpoint.recovery.peers)
    with for_hydra():
        checkpoint.dir = expanded(checkpoint.dir, "checkpoint.dir")
        if checkpoint.local.dir is not None:
            checkpoint.local.dir = expanded(checkpoint.local.dir, "checkpoint.local.dir")
        for name in ("to", "mirror"):
            value = getattr(checkpoint.publish, name)
            if value is not None:
                setattr(checkpoint.publish, name, expanded(value, f"checkpoint.publish.{name}"))
        checkpoint.resume = checked_resume(checkpoint.resume)
    refuse_bad_tiers(checkpoint)
    refuse_bad_publish(checkpoint)
    refuse_contradictions(checkpoint)
    for kind, part in parts.items():
        setattr(checkpoint, kind, _complete(kind, part))
    return checkpoint


def unresolved(
    config: DictConfig | Mapping[str, Any] | Checkpoint | str, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """The config that `resolve_config` reads, as nested dicts with its interpolations, and not checked."""
    overrides = checked_overrides(overrides)
    if isinstance(config, str):
        config, overrides = compose_checkpoint(config, overrides), []
    return _override(_plain(config, resolve=False), overrides, resolve=False)


def _complete(kind: str, part: dict[str, Any]) -> dict[str, Any]:
    """Check types and ranges of our own part and add its defaults; a user's part is returned as it is."""
    schema = part_schema(kind, str(part.get("_target_")))
    if schema is None:
        return part
    values = {key: value for key, value in part.items() if key == "_target_" or key not in HYDRA_KEYS}
    return plain_dict(OmegaConf.structured(read(schema, values, f"checkpoint.{kind}")), resolve=False)


def _plain(config: Any, *, resolve: bool = True) -> dict[str, Any]:
    """Convert a config to nested dicts and lists, with all interpolations resolved if `resolve` says so."""
    refuse_built(config)
    try:
        if is_dataclass(config):
            config = OmegaConf.structured(config)
        if not isinstance(config, DictConfig):
            config = OmegaConf.create({key: _plain_value(value, resolve) for key, value in config.items()})
        tree = plain_dict(config, resolve=resolve)
    except OmegaConfBaseException as error:
        raise HydraConfigError(omegaconf_text(error, "checkpoint")) from None
    if not isinstance(tree, dict):
        raise HydraConfigError(f"The checkpoint config is {tree!r}; choose a preset: checkpoint=async_persistent")
    return {str(key): value for key, value in tree.items()}


def _override(tree: dict[str, Any], overrides: Sequence[str], *, resolve: bool = True) -> dict[str, Any]:
    """Swap the options of groups first, then set values, as Hydra does."""
    if not overrides:
        return tree
    parsed = [_readable(text, tree) for text in overrides]
    for override in parsed:
        if "/" in override.key_or_group:
            group = override.key_or_group.partition("/")[2]
            tree = {**tree, group: compose_option(group, str(override.value()))}
    changed = OmegaConf.create(tree)
    try:
        for override in parsed:
            if "/" not in override.key_or_group:
                key = override.key_or_group.partition(".")[2]
                OmegaConf.update(changed, key, override.value(), merge=True)
        return plain_dict(changed, resolve=resolve)
    except OmegaConfBaseException as error:
        raise HydraConfigError(omegaconf_text(error, "checkpoint")) from None


def _readable(text: str, tree: Mapping[str, Any]) -> Override:
    """Parse one override of a config; refuses what only Hydra's command line supports."""
    override = parse_override(text, several=False)
    key, value = override.key_or_group, (override.input_line or "").partition("=")[2]
    if override.is_delete():
        raise HydraConfigError(f"{key} cannot be deleted. Set it to null instead, if it may be null: {key}=null")
    if key == "checkpoint":
        raise HydraConfigError(
            f"{text} picks a whole preset, but a config was already given; pass {value!r} as the config."
        )
    if key.startswith("checkpoint/"):
        if key not in _GROUPS:
            raise HydraConfigError(unknown_group(key, value, _GROUPS, list(dotted_keys(tree, "checkpoint."))))
        return override
    if not key.startswith("checkpoint.") or "/" in key:
        keys = list(dotted_keys({"checkpoint": dict(tree)}))
        raise HydraConfigError(
            unknown_key(key, keys, value, _GROUPS) or f"{text} is not below checkpoint, such as checkpoint.dir=x."
        )
    return override


def _plain_value(value: Any, resolve: bool) -> Any:
    """A value of a dict as plain data. A node is converted while it is in its own config, to which it may refer."""
    if isinstance(value, DictConfig):
        return plain_dict(value, resolve=resolve)
    return os.fspath(value) if isinstance(value, os.PathLike) else value
