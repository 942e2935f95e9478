"""Suggest corrections for overrides that Hydra cannot compose.

Hydra's own text for a misspelt key advises to append it with `+`, and its text for a bad value does not say
what is wrong with it. So each override is checked again against the keys and groups of the config.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...core.spelling import closest
from ..schema import GROUPS, SETTINGS
from .hydra_errors import CheckpointConfigError
from .overrides import parse_override, torn_apart

#: Groups that are not for users: Hydra's own, and our schemas.
_HIDDEN_GROUPS = ("hydra", "ckpt_component")
#: Name -> options.
Groups = Mapping[str, Sequence[str]]
_NO_GROUPS: Groups = {}


#: Launchers and sweepers of other packages, which the extra `sweeps` installs.
_PLUGINS = {
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
}

#: Keys that have keys below them -> that of them which a value set on them is meant for.
_TAKES_VALUE = {"checkpoint.keep": "last", "checkpoint.keep.best": "metric"}
#: Keys that one may look for -> Hydra's.
_MEANT = {"sweep.resume": "hydra.sweep.dir"}
#: Suggested if no option resembles what was typed: the parts of the recommended preset, and what `none` is not.
USUAL = {"stager": "shared_memory", "caller": "persistent", "writer": "dcp", "recovery": "host"}
#: Keys of earlier releases -> why they were removed.
REMOVED = {"checkpoint.stager.device_buffer_bytes": "because the device buffer never ran on a GPU"}


def what_was_meant(error: BaseException, overrides: Sequence[str], config_name: str | None = None) -> str | None:
    """Explain in one line what is wrong with `overrides` that Hydra refused, and what to type instead.

    Call it while Hydra is initialized.

    Args:
        error: Hydra's error; overrides that it does not name are not its cause
        overrides: the overrides as typed
        config_name: the primary config, or None without one

    Returns:
        The text, or None if there is no better one than Hydra's.
    """
    parsed = []
    for typed in overrides:
        try:
            parsed.append(parse_override(typed))
        except CheckpointConfigError as failure:
            return torn_apart(overrides) or str(failure)
    hydra_text = f"{error} {error.__cause__ or ''}"
    plugin = _missing_plugin(hydra_text)
    if plugin:
        return plugin
    loader = GlobalHydra.instance().config_loader()
    groups = _LoaderGroups(loader)
    picks = [override for override in parsed if override.key_or_group in groups]
    refused = [
        override
        for override in parsed
        if (override.key_or_group in hydra_text or _picks_nothing(override, groups))
        and not override.key_or_group.startswith("hydra/")
    ]
    # Overrides that can be composed: Hydra finds an option of --config-dir only with the whole command line.
    usable = [item for item in picks if _unknown_option(item, loader, "") is None and not _picks_nothing(item, groups)]
    keys: list[str] | None = None
    hydra_keys = functools.cache(lambda: _keys_of(config_name, usable, of_hydra=True))
    for override in sorted(refused, key=lambda item: item not in picks):
        text: str | None = None
        if override.key_or_group.startswith("hydra."):  # Hydra itself explains all but a misspelt key well
            if "is not in struct" in hydra_text or " not in '" in hydra_text:
                text = unknown_key(override.key_or_group, hydra_keys(), _value_text(override))
        elif override in picks:
            # Without an app, the plus of `+checkpoint=sync` is ours.
            is_ours = config_name is None and override.key_or_group.startswith("checkpoint")
            plus = "+" if override.is_add() and not is_ours else ""
            text = _unfit_pick(override, refused, hydra_text) or _unknown_option(override, loader, plus)
        else:
            keys = _keys_of(config_name, usable) if keys is None else keys
            if "/" in override.key_or_group:
                text = unknown_group(override.key_or_group, _value_text(override), groups, keys)
            elif keys and (own := _hydra_key(override.key_or_group, keys, hydra_keys)):
                text = f"There is no key {override.key_or_group}. Did you mean {own}={_value_text(override)}?"
            elif keys:
                text = _several_values(override, hydra_text) or _unfit_value(override, keys, groups, hydra_text)
        if text:
            return text
    return None


def _hydra_key(key: str, keys: Sequence[str], hydra_keys: Callable[[], Sequence[str]]) -> str | None:
    """The key of Hydra's that is meant by `sweep.dir`, where the app has nothing of that name; else None."""
    if "." not in key or key.partition(".")[0] in keys:
        return None
    guess = _MEANT.get(key, f"hydra.{key}")
    return guess if guess in hydra_keys() else None


def unknown_key(key: str, keys: Sequence[str], value: str | None = None, groups: Groups = _NO_GROUPS) -> str | None:
    """The text for a dotted key that does not exist; None if it does.

    Args:
        key: the key as typed
        keys: all dotted keys, including inner nodes
        value: the value as typed, for the suggestion
        groups: config groups with their options, which are picked with a slash
    """
    if key in keys:
        return None
    if key in REMOVED:
        return f"{key} was removed, {REMOVED[key]}; leave it out."
    as_group = key.replace(".", "/")
    group = next((name for name in groups if name == as_group or name.endswith(f"/{as_group}")), None)
    if group and value is not None:
        return f"There is no key {key}. {_pick(group, value, groups[group])}"
    parent, _, last = key.rpartition(".")
    guess = None
    if parent == "" or parent in keys:
        siblings = [name for name in keys if name.rpartition(".")[0] == parent]
        match = closest(last, [name.rpartition(".")[2] for name in siblings])
        guess = match and (f"{parent}.{match}" if parent else match)
    guess = guess or next((name for name in keys if name.endswith(f".{key}")), None)
    if guess is None and parent not in keys:
        guess = closest(key, keys, cutoff=0.8)
    if guess:
        return f"There is no key {key}. Did you mean {guess}{'' if value is None else f'={value}'}?"
    if not parent:
        return f"There is no key {key}. {keys_text('the config', [name for name in keys if '.' not in name])}"
    if parent in keys and not siblings:  # a mapping, whose keys are the user's; of others at least _target_ is known
        return f"There is no key {key} yet; to add it, type +{key}{'' if value is None else f'={value}'}."
    if parent in keys:
        names = [name.rpartition(".")[2] for name in siblings if not name.rpartition(".")[2].startswith("_")]
        return f"There is no key {key}. {keys_text(parent, names)}"
    return f"There is no key {key}."


def unknown_key_of(parent: str, key: str, keys: Sequence[str]) -> str:
    """The text for a key that its parent does not have."""
    text = unknown_key(f"{parent}.{key}", [parent, *(f"{parent}.{name}" for name in keys)])
    return text or f"There is no key {parent}.{key}."


def not_itself(key: str, value: object, names: Sequence[str]) -> str:
    """The text for a value where keys belong, with the key that takes such a value.

    Args:
        key: the key as typed, which has keys below it
        value: the value as typed
        names: those keys
    """
    group = key.removeprefix("checkpoint.")
    if group in SETTINGS and isinstance(value, str) and value not in ("", "null"):
        return picked_with_a_dot(group, value)
    usual = _TAKES_VALUE.get(key)
    if usual is not None and value not in (None, "", "null"):
        return f"{key} cannot itself be {value}. Did you mean {key}.{usual}={value}?"
    return f"{key} cannot itself be {value or 'empty'}. {keys_text(key, names)}"


def picked_with_a_dot(group: str, option: str) -> str:
    """The text for `checkpoint.stager=pinned`, which sets a string, with the slash that picks the option."""
    text = f"checkpoint.{group}={option!r} sets a string; to choose a component use a slash: checkpoint/{group}="
    match = option if option in GROUPS[group] else closest(option, GROUPS[group])
    if match:
        return text + match
    return f"{text}{USUAL[group]}. checkpoint/{group} can be: {', '.join(GROUPS[group])}, or your own"


def keys_text(parent: str, names: Sequence[str]) -> str:
    """A sentence that lists the keys."""
    return f"The keys of {parent}: {', '.join(names)}." if names else f"{parent} has no keys."


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """All keys of a nested dict, `a.b.c`, inner nodes included."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"{prefix}{key}"
            yield from dotted_keys(value, f"{prefix}{key}.")


def unknown_group(name: str, value: str, groups: Groups, keys: Sequence[str]) -> str:
    """The text for `checkpoint/stagr=pinned`, and for a slash where a dot belongs."""
    as_key = name.replace("/", ".")
    if as_key in keys:
        return f"{name} is not a config group. Set a value with dots: {as_key}={value}."
    guess = closest(name, groups)
    return f"There is no group {name}." + (f" {_pick(guess, value, groups[guess])}" if guess else "")


def _pick(group: str, value: str, options: Sequence[str]) -> str:
    """What to type to pick an option of a group."""
    match = value if value in options else closest(value, options)
    return f"Did you mean {group}={match}?" if match else f"{group} can be: {', '.join(options)}."


class _LoaderGroups(dict[str, Sequence[str]]):
    """The config groups of an app. Their options are listed on demand, because Hydra is slow at it."""

    def __init__(self, loader: ConfigLoader) -> None:
        super().__init__(dict.fromkeys(_all_groups(loader, ""), ()))
        self._loader = loader

    def __getitem__(self, name: str) -> Sequence[str]:
        return self._loader.get_group_options(name)


def _missing_plugin(hydra_text: str) -> str | None:
    """The text for a launcher or sweeper whose package is not installed."""
    match = re.search(r"Could not (?:find|load) '(hydra/(?:launcher|sweeper)/\w+)'", hydra_text)
    package = match and _PLUGINS.get(match[1])
    if not match or not package:
        return None
    choice = "=".join(match[1].rsplit("/", 1))
    return f"{choice} needs the package {package}, which is not installed: pip install {package}"


def _picks_nothing(override: Override, groups: Groups) -> bool:
    """Whether an override is like `checkpoint=null`, which Hydra's error does not name."""
    return override.key_or_group in groups and override.type is OverrideType.CHANGE and override.value() is None


def _unfit_pick(override: Override, refused: Sequence[Override], hydra_text: str) -> str | None:
    """The text for an option that exists but cannot be picked like this."""
    group, value = override.key_or_group, _value_text(override)
    if _picks_nothing(override, {group: ()}):
        instead = "; to save nothing, type checkpoint=off" if group == "checkpoint" else ""
        return f"{group}={value} picks nothing{instead or ', and one of its files is needed'}."
    twins = [other for other in refused if other.key_or_group == group and other.is_add()]
    if f"Multiple values for {group}" in hydra_text and len(twins) > 1:
        both = ",".join(_value_text(twin) for twin in twins)
        return f"{group} is added more than once. Did you mean +{group}=[{both}]?"
    if f"Multiple values for {group}" in hydra_text and twins:
        return added_twice(group, value)
    if "No match in the defaults list" in hydra_text and override.type is OverrideType.CHANGE:
        return f"{group} is not in the app's defaults list, so a plus adds it. Did you mean +{group}={value}?"
    return _several_values(override, hydra_text)


def added_twice(group: str, value: str) -> str:
    """The text for `+checkpoint=sync` in an app that has `checkpoint` in its defaults list."""
    return (
        f"{group} is already in the app's defaults list, and a plus would add it again. Did you mean {group}={value}?"
    )


def _several_values(override: Override, hydra_text: str) -> str | None:
    if "Ambiguous value" not in hydra_text or not override.is_sweep_override():
        return None
    return f"{override.input_line} has several values; -m runs a job for each: -m {override.input_line}"


def _unknown_option(override: Override, loader: ConfigLoader, plus: str) -> str | None:
    """The text for `checkpoint=async_persistant`, where the group exists and the option does not."""
    group = override.key_or_group
    options = loader.get_group_options(group)
    for choice in _choices(override):
        if choice not in options:
            guess = closest(choice, options)
            where = f"@{override.package}" if override.package else ""
            hint = f" Did you mean {plus}{group}{where}={guess}?" if guess else ""
            custom = f", or a file of your own, {group}/{choice}.yaml in a --config-dir" if not guess else ""
            return f"There is no {group}={choice}.{hint} {group} can be: {', '.join(options)}{custom}."
    return None


def _unfit_value(override: Override, keys: Sequence[str], groups: Groups, hydra_text: str) -> str | None:
    """The text for a key that does not exist or cannot be deleted, or for a value of the wrong type."""
    key, value = override.key_or_group, _value_text(override)
    if override.is_delete():
        return f"{key} cannot be deleted. Set it to null instead, if it may be null: {key}=null"
    inner = [name.rpartition(".")[2] for name in keys if name.rpartition(".")[0] == key]
    is_part = "_target_" in inner and "_recursive_" not in inner
    if inner and not is_part and not value.startswith(("{", "$")):
        return not_itself(key, value, inner)
    unknown = unknown_key(key, keys, value, groups) if override.type is OverrideType.CHANGE else None
    return unknown or _other_type(key, value, hydra_text)


#: OmegaConf's name of a type -> its description.
_KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def _other_type(key: str, value: str, hydra_text: str) -> str | None:
    """The text for a value that OmegaConf could not convert."""
    conversion = re.search(r"could not be converted to (\w+)", hydra_text)
    if "is not a valid bool" in hydra_text:
        return f"{key} must be {_KINDS['Boolean']}, got {value}."
    if conversion and conversion[1] in _KINDS:
        return f"{key} must be {_KINDS[conversion[1]]}, got {value}."
    if "is not Optional" in hydra_text or "Incompatible value 'None'" in hydra_text:
        return f"{key} cannot be null."
    if "incompatible with type hint" in hydra_text:
        return f"{key} cannot be {value}; it takes a number or a string."
    return None


def _choices(override: Override) -> list[str]:
    """The options that a group override picks, several in a sweep; none for values that are not plain names."""
    if override.is_delete():
        return []
    if override.is_sweep_override():
        return [text.strip() for text in override.sweep_string_iterator()] if override.is_choice_sweep() else []
    value = override.value()
    return [str(name) for name in value] if isinstance(value, list) else [value] if isinstance(value, str) else []


def _all_groups(loader: ConfigLoader, parent: str) -> Iterator[str]:
    for name in loader.list_groups(parent):
        if parent == "" and name in _HIDDEN_GROUPS:
            continue
        group = f"{parent}/{name}" if parent else name
        yield group
        yield from _all_groups(loader, group)


def _keys_of(config_name: str | None, picks: Sequence[Override], *, of_hydra: bool = False) -> list[str]:
    """The keys of the config with these group choices, or Hydra's own; none if it cannot be composed."""
    lines = [override.input_line or "" for override in picks if not override.is_sweep_override()]
    try:
        config = compose(config_name, lines, return_hydra_config=of_hydra)
    except (HydraException, OmegaConfBaseException):
        return []
    tree = OmegaConf.to_container(config)
    return list(dotted_keys({"hydra": tree["hydra"]} if of_hydra and isinstance(tree, dict) else tree))


def _value_text(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def without_noise(error: BaseException) -> str:
    """Hydra's text and its cause in one line."""
    lines = [str(error), str(error.__cause__ or "")]
    relevant = [
        line.strip()
        for line in "\n".join(lines).splitlines()
        if line.strip()
        and not line.strip().startswith(("full_key", "object_type", "To append", "See http", "reference_type"))
    ]
    text = ": ".join(line.rstrip(".").removeprefix("Error merging override ") for line in relevant) + "."
    no_list = re.fullmatch(r"([\w.]+)=([^:]+): Invalid value assigned: \w+ is not a ListConfig,.*", text)
    return text if no_list is None else f"{no_list[1]} is a list: {no_list[1]}=[{no_list[2]}]."
