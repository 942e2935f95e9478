"""Where each choice and value of a composed checkpoint config comes from: a file, an override, or the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra import compose
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from ..schema import GROUPS
from .compose import hydra_session
from .store import SCHEMAS

#: The origin of values that are not set anywhere.
DEFAULT = "default"
_OVERRIDE = "override"


@dataclass
class Origins:
    """Origins of a config, in words such as `preset sync`, `recipe safest`, `override`, `default`.

    Attributes:
        preset: the preset
        choices: group, `checkpoint` or `checkpoint/<name>` -> where the choice was made
        values: dotted key -> where the value was set; keys with their default are missing
    """

    preset: str
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    def of(self, key: str) -> str:
        """Where a key was set, itself or as a part of a dict."""
        while "." in key:
            if key in self.values:
                return self.values[key]
            key = key.rpartition(".")[0]
        return DEFAULT


def origins_of(preset: str, overrides: Sequence[str]) -> Origins:
    """Find the origins of `compose_checkpoint(preset, overrides)`, which must have succeeded."""
    with hydra_session():
        loader = GlobalHydra.instance().config_loader()
        request = [f"+checkpoint={preset}", *overrides]
        defaults = loader.compute_defaults_list(config_name=None, overrides=request, run_mode=RunMode.RUN)
        files = _repository(request)
        found = Origins(str(defaults.overrides.known_choices["checkpoint"]))
        for entry in defaults.defaults:  # a later file replaces what earlier ones set
            path = entry.config_path or ""
            if path.startswith((f"{SCHEMAS}/", "hydra/")) or path == "_dummy_empty_config_":
                continue
            group = path.rpartition("/")[0]
            found.choices[group] = _name(entry.parent)
            loaded = files.load_config(path)
            content = OmegaConf.to_container(loaded.config, resolve=False) if loaded is not None else {}
            for key in _leaves(content, str(entry.package or "")):
                found.values[key] = _name(path)
        for group, made in defaults.overrides.override_metadata.items():
            if group == "checkpoint" or group.removeprefix("checkpoint/") in GROUPS:
                found.choices[group] = _OVERRIDE if made.external_override else _name(made.containing_config_path)
        for override in defaults.config_overrides:
            found.values[override.key_or_group] = f"{_OVERRIDE} {override.input_line}"
    return found


def _name(path: str | None) -> str:
    """`preset sync` for checkpoint/sync, `recipe safest`, `part dcp`."""
    group, _, name = (path or "").rpartition("/")
    kinds = {"checkpoint": "preset", "recipe": "recipe", **{f"checkpoint/{name}": name for name in GROUPS}}
    return f"{kinds[group]} {name}" if group in kinds else _OVERRIDE if path == "_dummy_empty_config_" else str(path)


def _repository(request: list[str]) -> ConfigRepository:
    """All folders of configs, those that an override of hydra.searchpath adds included."""
    path = ConfigSearchPathImpl()
    for source in compose(overrides=request, return_hydra_config=True).hydra.runtime.config_sources:
        path.append(source.provider, f"{source.schema}://{source.path}")
    return ConfigRepository(path)


def _leaves(tree: Any, name: str) -> Iterator[str]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            if key not in ("defaults", "_target_"):
                yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif name:
        yield name
