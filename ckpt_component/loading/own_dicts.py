"""Dicts of other classes in a target: they stay what they are, and get what a checkpoint has for them."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointLoadError, first_keys
from ..formats.index import Contents
from ..state.flatten import FlatState
from ..state.paths import Path, key_of, keys_of, lost_class


def emptied(flat: FlatState, contents: Contents) -> FlatState:
    """A target whose counters and defaultdicts of plain values count as empty, where the checkpoint has them.

    Their keys are data, so that all of a checkpoint's belong into them, and others do not.

    Args:
        flat: the target
        contents: the checkpoint
    """
    others = _containers_of([*flat.tensor_paths, *(path for path, _ in flat.stateful)])
    modules = tuple(f"{key_of(path)}." for path, each in flat.stateful if isinstance(each, torch.nn.Module))
    stored = _containers_of(path for _, path in contents.paths())
    stored.update(key_of(path) for path, _ in contents.containers)
    chosen = {
        path
        for path, mapping in flat.mappings.items()
        if isinstance(mapping, (Counter, defaultdict))
        and (key := key_of(path)) in stored
        and key not in others
        and not key.startswith(modules)  # a module takes no keys that it does not have
    }
    if not chosen:
        return flat
    depths = {len(path) for path in chosen}
    left = flat.only(lambda path: not any(path[:depth] in chosen for depth in depths if depth < len(path)))
    empty = [(path, "empty") for path in chosen if path in left.mappings]
    # The class of a dict is said after that it is empty.
    return replace(left, containers=[*empty, *left.containers])


def refill(mapping: MutableMapping[Any, Any], values: Mapping[Any, Any], key: str) -> None:
    """Put values into a dict of the target in place of those that it has.

    Raises:
        CheckpointLoadError: it does not take them
    """
    try:
        mapping.clear()
        mapping.update(values)
    except Exception as error:  # the methods of a class may raise anything
        raise CheckpointLoadError(
            f"'{key}' ({type(mapping).__name__}) in the target does not take its values: {str(error).rstrip('. ')}; "
            "load into a dict."
        ) from error


def in_own_classes(value: Any, path: Path, mappings: Mapping[Path, MutableMapping[Any, Any]]) -> Any:
    """The state for an object, with dicts of the classes that its own state has.

    Args:
        value: the state
        path: path of the object
        mappings: dicts of other classes in the target, by path
    """
    for place in sorted((place for place in mappings if place[: len(path)] == path), key=len, reverse=True):
        around, names = value, place[len(path) :]
        try:
            for name in names[:-1]:
                around = around[name]
            found = around[names[-1]] if names else value
        except (LookupError, TypeError):
            continue  # the checkpoint has something else there, which the object gets as it is
        if isinstance(found, Mapping) and type(found) is not type(mappings[place]):
            own = copy.copy(mappings[place])
            refill(own, found, key_of(place))
            if names:
                around[names[-1]] = own
            else:
                value = own
    return value


def plain_now(contents: Contents, new: Iterable[Path], flat: FlatState | None = None) -> str | None:
    """A sentence on the dicts that were of other classes when they were saved, and are plain now; None: there are none.

    Args:
        contents: the checkpoint
        new: paths of what is loaded without a value of the target; an empty path is the whole checkpoint
        flat: the target, or None
    """
    lost = [(path, name) for path, kind in contents.containers if (name := lost_class(kind)) is not None]
    if not lost:
        return None
    own = set[str]()
    if flat is not None:
        own = _containers_of([*flat.tensor_paths, *flat.object_paths]) | {*keys_of([*flat.mappings])}
    whole = {*new}
    around = _containers_of(whole)
    plain = [
        f"{key_of(path)} ({name})"
        for path, name in lost
        if key_of(path) not in own
        and (key_of(path) in around or any(path[:depth] in whole for depth in range(len(path) + 1)))
    ]
    if not plain:
        return None
    return f"{first_keys(plain)}: only a dict of this class in the target keeps the class, so a plain dict came back"


def _containers_of(paths: Iterable[Path]) -> set[str]:
    """The keys of all dicts and lists around paths."""
    parents = {path[:-1] for path in paths}
    return {key_of(parent[:depth]) for parent in parents for depth in range(1, len(parent) + 1)}
