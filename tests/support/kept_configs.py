"""Configs that are composed and read once: that takes 0.2 s, and most tests ask for the same ones."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from ckpt_component.config import Checkpoint, compose_checkpoint, resolve_config
from ckpt_component.config.hydra.overrides import parse_override


def compose_once(preset: str, overrides: Sequence[str] = ()) -> DictConfig:
    """As `compose_checkpoint`; within an app Hydra composes each time."""
    if GlobalHydra.instance().is_initialized():
        return compose_checkpoint(preset, overrides)
    config: DictConfig = pickle.loads(_composed(preset, *overrides))
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


def compose_app_once(
    name: str, compose: Callable[[Sequence[str]], DictConfig], overrides: Sequence[str] = ()
) -> DictConfig:
    """As `compose` of the overrides for the app of this name: the groups that they choose are composed once."""
    groups = [text for text in overrides if text[0] in "+~" or _is_part(text) or "." not in text.partition("=")[0]]
    values = [text for text in overrides if text not in groups]
    chosen = (name, *groups)
    if chosen not in _APPS:
        try:
            _APPS[chosen] = pickle.dumps(compose(groups))
        except Exception:
            return compose(overrides)  # its error is about all of them
    config = _with_values(pickle.loads(_APPS[chosen]), values, "")
    return compose(overrides) if config is None else config


def _is_part(override: str) -> bool:
    return "/" in override.partition("=")[0]


@functools.cache
def _composed(preset: str, *overrides: str) -> bytes:
    """A pickled config, which is read five times as fast as OmegaConf copies one."""
    groups = [text for text in overrides if _is_part(text)]
    values = [text for text in overrides if text not in groups]
    config = _with_values(pickle.loads(_composed(preset, *groups)), values, "checkpoint.") if values else None
    return pickle.dumps(compose_checkpoint(preset, overrides) if config is None else config)


def _with_values(config: DictConfig, values: Sequence[str], above: str) -> DictConfig | None:
    """The config, which in the app is below `above`, with overrides of plain values.

    None if Hydra has to say what they mean, or what is wrong.
    """
    try:
        for override in (parse_override(text, several=False) for text in values):
            value, key = override.value(), override.key_or_group.removeprefix(above)
            added = override.is_add() or override.is_delete() or override.is_sweep_override()
            # A part is not chosen by a value.
            if added or isinstance(value, (dict, list)) or isinstance(OmegaConf.select(config, key), DictConfig):
                return None
            OmegaConf.update(config, key, value)
    except Exception:
        return None
    return config


#: By the text of the config.
_READ: dict[str, Checkpoint] = {}
#: Pickled, by the name of the app and the groups.
_APPS: dict[tuple[str, ...], bytes] = {}
