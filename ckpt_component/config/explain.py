"""What was probably meant: texts for overrides that Hydra cannot compose.

Hydra's own text for a misspelt key advises to append it with `+`, and its text for a bad value does not say
what was wrong with it. So the overrides are looked at again, one by one, against what the config really
has.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import CheckpointConfigError

#: Groups that nobody picks from: Hydra's own, and our schemas.
_HIDDEN_GROUPS = ("hydra", "ckpt_component")


def explain(error: Exception, overrides: Sequence[str], config_name: str | None = None) -> str:
    """Say in one line what is wrong with `overrides`: what was meant, or Hydra's text without its noise.

    Args:
        error: what Hydra raised.
        overrides: as they were typed.
        config_name: the primary config, or None when there is none.
    """
    return what_was_meant(error, overrides, config_name) or _without_noise(error)


def what_was_meant(error: BaseException, overrides: Sequence[str], config_name: str | None = None) -> str | None:
    """Say in one line what is wrong with `overrides` that Hydra refused, and what to type instead.

    Call it while Hydra is initialized.

    Args:
        error: what Hydra raised; overrides that it does not name are none of its reasons.
        overrides: as they were typed.
        config_name: the primary config, or None when there is none.

    Returns:
        The text, or None when nothing is found that Hydra does not say as well.
    """
    loader = GlobalHydra.instance().config_loader()
    try:
        parsed = [parse_override(text) for text in overrides]
    except CheckpointConfigError as unreadable:
        return str(unreadable)
    groups = list(_all_groups(loader, ""))
    picks = [override for override in parsed if override.key_or_group in groups]
    named = f"{error} {error.__cause__ or ''}"
    # What is Hydra's own, it explains itself, and an app's config does not have its keys.
    refused = [
        override
        for override in parsed
        if override.key_or_group in named and not override.key_or_group.startswith(("hydra.", "hydra/"))
    ]
    for override in refused:
        if override not in picks and "/" in override.key_or_group:
            keys = _keys_of(config_name, picks)
            return unknown_group(override.key_or_group, _value_text(override), groups, keys)
    for override in (override for override in refused if override in picks):
        text = _unknown_option(override, loader, "+" if override.is_add() and config_name else "")
        if text:
            return text
    # An option that is not here may be in a folder of --config-dir.
    keys = _keys_of(config_name, [override for override in picks if _unknown_option(override, loader, "") is None])
    for override in refused:
        if override not in picks and keys:
            text = _unfit_value(override, keys)
            if text:
                return text
    return None


def parse_override(text: str, several: bool = True) -> Override:
    """Read one `key=value`.

    Args:
        text: as it was typed.
        several: allow several values, as in a sweep.

    Raises:
        CheckpointConfigError: it cannot be read (the text shows it in quotes), or has several values.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, equals, value = text.partition("=")
        if not equals:
            raise CheckpointConfigError(f"{text!r} is not of the form key=value.") from None
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        raise CheckpointConfigError(
            f"{text} cannot be read ({_first_line(error)}). A value with special characters needs quotes, in "
            f"the shell two pairs of them: '{key}=\"{quoted}\"'."
        ) from None
    if override.is_sweep_override() and not several:
        raise CheckpointConfigError(
            f"{text} has several values. Quote them if they are one text; to sweep, run a Hydra app with -m."
        )
    return override


def unknown_key(key: str, known: Sequence[str], value: str | None = None) -> str | None:
    """The text for a dotted key that is not among the known ones; None when it is.

    Args:
        key: as it was typed.
        known: all dotted keys, with those of inner nodes.
        value: what was to be set, for the suggestion.
    """
    if key in known:
        return None
    parent, _, last = key.rpartition(".")
    meant = None
    if parent == "" or parent in known:
        siblings = [name for name in known if name.rpartition(".")[0] == parent]
        near = closest(last, [name.rpartition(".")[2] for name in siblings])
        meant = near and (f"{parent}.{near}" if parent else near)
    meant = meant or next((name for name in known if name.endswith(f".{key}")), None)
    if meant is None and parent not in known:
        meant = closest(key, known, cutoff=0.8)
    if meant:
        return f"There is no key {key}. Did you mean {meant}{'' if value is None else f'={value}'}?"
    if parent in known:
        names = sorted(name.rpartition(".")[2] for name in siblings if not name.endswith("._target_"))
        return f"There is no key {key}. {keys_text(parent, names)}"
    return f"There is no key {key}."


def keys_text(parent: str, names: Sequence[str]) -> str:
    """What there is, as a sentence."""
    return f"The keys of {parent}: {', '.join(names)}." if names else f"{parent} has no keys."


def closest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `words` that `word` is most likely a slip of, or None."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """All keys of a nested dict, `a.b.c`, inner nodes included."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"{prefix}{key}"
            yield from dotted_keys(value, f"{prefix}{key}.")


def unknown_group(name: str, value: str, groups: Sequence[str], keys: Sequence[str]) -> str:
    """The text for `checkpoint/stagr=pinned`, and for a slash where a dot is meant."""
    as_key = name.replace("/", ".")
    if as_key in keys:
        return f"{name} is not a group of files. A value is set with dots: {as_key}={value}."
    meant = closest(name, groups)
    return f"There is no group {name}." + (f" Did you mean {meant}={value}?" if meant else "")


def _unknown_option(override: Override, loader: ConfigLoader, plus: str) -> str | None:
    """For `checkpoint=async_persistant`, where the group exists and the file does not."""
    group = override.key_or_group
    options = loader.get_group_options(group)
    for choice in _choices(override):
        if choice not in options:
            meant = closest(choice, options)
            hint = f" Did you mean {plus}{group}={meant}?" if meant else ""
            return f"There is no {group}={choice}.{hint} {group} can be: {', '.join(options)}."
    return None


def _unfit_value(override: Override, keys: Sequence[str]) -> str | None:
    """For a key that does not exist, one that cannot be deleted, and a value where further keys belong."""
    key, value = override.key_or_group, _value_text(override)
    if override.is_delete():
        return f"{key} cannot be deleted. Set it to null instead, where it may be: {key}=null"
    inner = [name.rpartition(".")[2] for name in keys if name.rpartition(".")[0] == key]
    if inner and "_target_" not in inner and not value.startswith(("{", "$")):
        return f"{key} cannot itself be {value}. {keys_text(key, inner)}"
    return unknown_key(key, keys, value) if override.type is OverrideType.CHANGE else None


def _choices(override: Override) -> list[str]:
    """What a group override picks; several in a sweep. Nothing for what is not a plain name."""
    if override.is_delete():
        return []
    if override.is_sweep_override():
        return [text.strip() for text in override.sweep_string_iterator()] if override.is_choice_sweep() else []
    value = override.value()
    return [value] if isinstance(value, str) else []


def _all_groups(loader: ConfigLoader, parent: str) -> Iterator[str]:
    for name in loader.list_groups(parent):
        if parent == "" and name in _HIDDEN_GROUPS:
            continue
        group = f"{parent}/{name}" if parent else name
        yield group
        yield from _all_groups(loader, group)


def _keys_of(config_name: str | None, picks: Sequence[Override]) -> list[str]:
    """The keys of the config with these groups; none when it cannot be composed."""
    try:
        config = compose(
            config_name, [override.input_line or "" for override in picks if not override.is_sweep_override()]
        )
    except (HydraException, OmegaConfBaseException):
        return []
    return list(dotted_keys(OmegaConf.to_container(config)))


def _value_text(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def _without_noise(error: BaseException) -> str:
    """Hydra's text and its cause in one line."""
    lines = [str(error), str(error.__cause__ or "")]
    kept = [
        line.strip()
        for line in "\n".join(lines).splitlines()
        if line.strip()
        and not line.strip().startswith(("full_key", "object_type", "To append", "See http", "reference_type"))
    ]
    return ": ".join(line.rstrip(".").removeprefix("Error merging override ") for line in kept) + "."


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
