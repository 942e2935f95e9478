"""Configs that are composed and read once: that takes 0.2 s, and most tests ask for the same ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from ckpt_component.config import Checkpoint, compose_checkpoint, resolve_config
from ckpt_component.config.hydra.overrides import parse_override


def compose_once(preset: str, overrides: Sequence[str] = ()) -> DictConfig:
    """As `compose_checkpoint`; within an app Hydra composes each time."""
    if GlobalHydra.instance().is_initialized():
        return compose_checkpoint(preset, overrides)
    parts = [text for text in overrides if "/" in text.partition("=")[0]]
    try:
        config = copy.deepcopy(_composed(preset, *parts))
        for override in (parse_override(text, several=False) for text in overrides if text not in parts):
            if (
                override.is_add()
                or override.is_delete()
                or override.is_sweep_override()
                or isinstance(override.value(), (dict, list))
            ):
                return compose_checkpoint(preset, overrides)
            key = override.key_or_group.removeprefix("checkpoint.")
            if isinstance(OmegaConf.select(config, key), DictConfig):  # a part, which a value does not choose
                return compose_checkpoint(preset, overrides)
            OmegaConf.update(config, key, override.value())
    except Exception:  # Hydra has a text for it
        return compose_checkpoint(preset, overrides)
    return config


def resolve_once(config: Any, overrides: Sequence[str] = ()) -> Checkpoint:
    """As `resolve_config`; what depends on the environment, or on files, is read each time."""
    if isinstance(config, str):
        config, overrides = compose_once(config, overrides), ()
    if not isinstance(config, DictConfig) or overrides:
        return resolve_config(config, overrides)
    text = repr(OmegaConf.to_container(config))
    if {*"$~/"} & {*text}:
        return resolve_config(config)
    if text not in _READ:
        _READ[text] = resolve_config(config)
    return copy.deepcopy(_READ[text])


@functools.cache
def _composed(preset: str, *parts: str) -> DictConfig:
    return compose_checkpoint(preset, parts)


#: By the text of the config.
_READ: dict[str, Checkpoint] = {}
