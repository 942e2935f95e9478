"""Give the saved state of each optimizer to the parameters of the same names, wherever they stand now.

A checkpoint has an optimizer's state by number (`optimizer.state.3.exp_avg`), and the names of the parameters beside it
(`state/parameter_names.py`); or by name, as torch's `get_optimizer_state_dict` returns it. If the target's
parameters have other numbers or groups, the load sees the checkpoint under the target's numbers. All that follows works
by number.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any, NamedTuple

from ..errors import CheckpointLoadError, first_keys
from ..formats.index import Contents, Entry
from ..formats.source import RenamedSource, Source
from ..state.compare import same_value
from ..state.flatten import FlatState
from ..state.parameter_names import NAMES, NamedOptimizer, named_optimizers
from ..state.paths import Path, key_of
from .saved_optimizers import SavedOptimizers, SavedParameter, number_in

#: Options of a group that say which parameters it has.
_MEMBERS = frozenset({"params", NAMES})
#: Lists of learning-rate schedulers with a value for each group.
_BY_GROUP = frozenset({"base_lrs", "_last_lr", "min_lrs", "max_lrs"})


class MatchedOptimizers(NamedTuple):
    """A target and a checkpoint whose optimizers have the same numbers.

    Attributes:
        source: the checkpoint under the target's numbers
        flat: the target, without the state of parameters for which the checkpoint has none
        notes: what became of the optimizers, a sentence each, to log
    """

    source: Source
    flat: FlatState
    notes: Sequence[str] = ()


def match_optimizers(flat: FlatState, source: Source, renamed: Callable[[str], str]) -> MatchedOptimizers:
    """Match the optimizers of a target with those of a checkpoint.

    Args:
        flat: the target
        source: the checkpoint, under the target's keys
        renamed: returns a parameter's name in the target, from that in the checkpoint

    Raises:
        CheckpointLoadError: parameters in one group now were in groups with other options
    """
    lists = {path for path, kind in source.contents.containers if kind == "list"}
    objects = source.contents.objects
    stored = {entry.path[:-1]: key for key, entry in objects.items() if entry.path[-1] == NAMES}
    stored = {path: key for path, key in stored.items() if (*path, "param_groups") in lists}
    targets = named_optimizers(flat)
    if not targets:
        return MatchedOptimizers(_without_names(source, stored, [], flat), flat)
    if _are_as_saved(targets, stored, source, renamed):
        return MatchedOptimizers(_without_names(source, stored, targets, flat), flat)
    saved = SavedOptimizers(source, stored, targets, renamed)
    source = _without_names(source, stored, targets, flat)
    # An optimizer whose state was stored without names may have had any of them.
    by_name = [
        target
        for target in targets
        if target.has_names and saved.names and (target.path in saved.names or not saved.has_state(target.path))
    ]
    unchecked = [
        f"'{key_of(target.path)}' is loaded by position, and the order of its parameters was not checked: "
        + (f"{source.where} does not have their names" if target.has_names else "they have no names in the target")
        for target in targets
        if target not in by_name and (target.has_names or target.path in saved.names) and saved.has_state(target.path)
    ]
    if not by_name:
        return MatchedOptimizers(source, flat, unchecked)
    matches = [_Match(target, saved) for target in by_name]
    taken = {origin for match in matches for origin in match.origins if origin is not None}
    notes = [note for match in matches for note in match.notes(taken)]
    return MatchedOptimizers(_aligned(matches, saved, flat, source), _pruned(matches, flat), [*unchecked, *notes])


def _are_as_saved(
    targets: Sequence[NamedOptimizer], stored: Mapping[Path, str], source: Source, renamed: Callable[[str], str]
) -> bool:
    """Whether the optimizers of a target have the parameters and groups that they had, and all of them had state."""
    keys = [stored.get(target.path) for target in targets]
    if None in keys or len(keys) != len(stored) or renamed is not str:
        return False
    names, contents = source.read_objects([*stored.values()]), source.contents
    paths = [entry.path for entries in (contents.tensors, contents.objects) for entry in entries.values()]
    for target in targets:
        depth, state = len(target.path), (*target.path, "state")
        numbers = {path[depth + 1] for path in paths if path[: depth + 1] == state}
        if names[stored[target.path]] != target.names or numbers != {*range(sum(map(len, target.names)))}:
            return False
    return True


class _Match:
    """One optimizer of the target, and where the state of its parameters is in the checkpoint.

    Attributes:
        target: the optimizer
        origins: for each parameter, by number: the saved one of its name; None: there is none
        fresh: numbers of the parameters without saved state
        groups: for each group, the saved groups that its parameters were in, in order
        is_same: whether all parameters have the numbers and groups that they had
    """

    def __init__(self, target: NamedOptimizer, saved: SavedOptimizers) -> None:
        self.target = target
        self._saved = saved
        self.origins: list[SavedParameter | None] = []
        self.groups: list[list[SavedParameter]] = []
        path = target.path
        unnamed = {number for number, name in enumerate(saved.names_of(path)) if name is None}
        for names, own in zip(target.names, target.own, strict=True):
            first = len(self.origins)
            for pair in zip(names, own, strict=True):
                number = len(self.origins)
                by_position = (path, number) if not any(pair) and number in unnamed else None
                self.origins.append(saved.find(path, *pair) or by_position)
            origins = [origin for origin in self.origins[first:] if origin is not None]
            self.groups.append([*dict.fromkeys((origin[0], saved.group_of[origin]) for origin in origins)])
        self.fresh = {
            number
            for number, origin in enumerate(self.origins)
            if origin is None or origin[1] not in saved.numbers_with_state(origin[0])
        }
        sizes = list(map(len, target.names))
        self.is_same = (
            self.origins == [(path, number) for number in range(len(self.origins))]
            and path in saved.names.keys() - saved.keyed_by_name.keys()
            and sizes == list(map(len, saved.names[path]))
        )

    def notes(self, taken: set[SavedParameter]) -> Iterator[str]:
        """What became of the optimizer, if not all of its state has gone to the parameters that had it.

        Args:
            taken: saved parameters whose state has gone to a parameter of any optimizer
        """
        key, path = key_of(self.target.path), self.target.path
        numbers = self._saved.numbers_with_state(path)
        parameters = [each for group in self.target.optimizer.param_groups for each in group["params"]]
        named = [*map(_first_name, chain(*self.target.names), chain(*self.target.own), count())]
        fresh = [named[number] for number in sorted(self.fresh) if parameters[number].requires_grad]
        if fresh and (numbers or len(self.fresh) < len(named)):  # else the checkpoint is from before the first step
            yield f"'{key}': the checkpoint has no state of {first_keys(fresh)}, which begins without"
        left = [(path, number) for number in sorted(numbers) if (path, number) not in taken]
        if left and path in self._saved.names:
            known = self._saved.names_of(path)
            gone = [_first_name(known[number], None, number) for _, number in left if number < len(known)]
            yield f"'{key}': nothing in the target takes the saved state of {first_keys(gone)}"


def _aligned(matches: Sequence[_Match], saved: SavedOptimizers, flat: FlatState, source: Source) -> Source:
    """The checkpoint under the numbers of the target's optimizers.

    Raises:
        CheckpointLoadError: see `match_optimizers`
    """
    moved = [match for match in matches if not match.is_same]
    if not moved:
        return source
    states: dict[SavedParameter, Path] = {}
    groups: dict[SavedParameter, list[Path]] = defaultdict(list)
    for match in moved:
        path = match.target.path
        for number, origin in enumerate(match.origins):
            if origin is not None:
                states[origin] = (*path, "state", number)
        for number, origins in enumerate(match.groups):
            _refuse_two_answers(match.target, number, origins, source)
            for origin in origins[:1]:
                groups[origin].append((*path, "param_groups", number))
    renumbered, targets = {match.target.path for match in moved}, {match.target.path for match in matches}
    used = {origin for match in matches for origins in match.groups for origin in origins}
    depths = sorted({len(path) for path in saved.names})

    def new_paths(path: Path) -> list[Path]:
        """The paths of a saved value in the target; its own, if it is not one of these optimizers'."""
        optimizer = next((path[:depth] for depth in depths if path[:depth] in saved.names), None)
        if optimizer is None or len(path) < len(optimizer) + 2:
            return [path]
        part, raw, rest = path[len(optimizer)], path[len(optimizer) + 1], path[len(optimizer) + 2 :]
        number = saved.number_of(optimizer, raw) if part == "state" else number_in(raw)
        if part == "state" and number is not None:
            new = states.get((optimizer, number))
            if new is None:
                return [] if optimizer in renumbered else [path]
            return [(*new, *rest)] if optimizer not in targets - renumbered else [path, (*new, *rest)]
        if part == "param_groups" and number is not None:
            gone = optimizer in renumbered or (optimizer not in targets and (optimizer, number) in used)
            stays = [] if gone else [path]
            return [*stays, *((*new, *rest) for new in groups[optimizer, number] if _MEMBERS.isdisjoint(rest[:1]))]
        return [path]

    contents, old = Contents(columns=source.contents.columns), dict[str, str]()
    for entries, new_entries in (
        (source.contents.tensors, contents.tensors),
        (source.contents.objects, contents.objects),
    ):
        for key, entry in entries.items():
            for path in new_paths(entry.path):
                new = key_of(path)
                new_entries[new] = Entry(new, path, *entry[2:])
                old[new] = key
    contents.containers = [(new, kind) for path, kind in source.contents.containers for new in new_paths(path)]
    lists = (((*match.target.path, "param_groups"), "list") for match in moved)
    contents.containers += [each for each in lists if each not in contents.containers]
    values: dict[str, Any] = {}
    for path, value in zip(flat.object_paths, flat.objects, strict=True):
        for match in moved:
            depth = len(match.target.path)
            if path[:depth] == match.target.path and path[depth : depth + 1] == ("param_groups",):
                is_new = not match.groups[path[depth + 1]]
                if is_new or path[depth + 2] in _MEMBERS:
                    values[key_of(path)] = value
                    contents.objects[key_of(path)] = Entry(key_of(path), path, "", (), 0, ())
    for match in moved:
        values.update(_of_schedulers(match, flat, source))
    return RenamedSource(source, contents, old, values)


def _refuse_two_answers(target: NamedOptimizer, number: int, origins: Sequence[SavedParameter], source: Source) -> None:
    """Refuse a group whose parameters had different options, such as learning rates."""
    options = [_options(origin, source) for origin in origins] if len(origins) > 1 else []
    for other, theirs in zip(origins[1:], options[1:], strict=True):
        for name in sorted(options[0].keys() | theirs.keys()):
            one, another = options[0].get(name), theirs.get(name)
            if not same_value(one, another):
                key, first, second = map(key_of, (target.path, *(_path_of(group) for group in (origins[0], other))))
                raise CheckpointLoadError(
                    f"Group {number} of '{key}' has parameters that were in '{first}' with {name}={one!r:.100} and in "
                    f"'{second}' with {name}={another!r:.100} of {source.where}; give them groups of their own, or "
                    f"keep the target's value with ignore=['{key}.param_groups.*.{name}']."
                )


def _path_of(group: SavedParameter) -> Path:
    return (*group[0], "param_groups", group[1])


def _options(group: SavedParameter, source: Source) -> dict[str, Any]:
    """The options of a saved group, by name."""
    path = _path_of(group)
    depth, contents = len(path), source.contents

    def below(entries: Mapping[str, Entry]) -> list[str]:
        found = [(key, entry.path) for key, entry in entries.items() if _is_group(entry.path, path)]
        return [key for key, place in found if place[depth] not in _MEMBERS]

    values = {**source.read_objects(below(contents.objects)), **source.new_tensors(below(contents.tensors))}
    return {key_of(contents.path_of(key)[depth:]): value for key, value in values.items()}


def _is_group(path: Path, group: Path) -> bool:
    """Whether a path is below that of a group; stock DCP makes its number a string."""
    depth = len(group)
    return len(path) > depth and path[: depth - 1] == group[:-1] and number_in(path[depth - 1]) == group[-1]


def _of_schedulers(match: _Match, flat: FlatState, source: Source) -> dict[str, Any]:
    """What schedulers have for each group of an optimizer, in the order of the target's groups.

    Raises:
        CheckpointLoadError: a value in a form that cannot be put into this order
    """
    values: dict[str, Any] = {}
    saved_groups = [[(match.target.path, number)] for number in range(len(match.groups))]
    if match.groups == saved_groups:
        return values
    own = dict(zip(map(key_of, flat.object_paths), flat.objects, strict=True))
    for path, value in flat.stateful:
        if getattr(value, "optimizer", None) is not match.target.optimizer or value is match.target.optimizer:
            continue
        keys = [
            key
            for key, entry in source.contents.objects.items()
            if entry.path[: len(path)] == path and entry.path[-1] in _BY_GROUP
        ]
        for key, saved in source.read_objects(keys).items():
            if not isinstance(saved, list):
                continue
            here = own.get(key)
            values[key] = [
                saved[origins[0][1]]
                if origins and origins[0][1] < len(saved)
                else here[number]
                if isinstance(here, list) and number < len(here)
                else saved[0]
                for number, origins in enumerate(match.groups)
            ]
    return values


def _pruned(matches: Sequence[_Match], flat: FlatState) -> FlatState:
    """A target without the state of parameters for which the checkpoint has none: it is to be as if never stepped."""
    fresh = {(*match.target.path, "state", number) for match in matches for number in match.fresh}
    depths = {len(path) for path in fresh}

    def stays(path: Path) -> bool:
        return not any(path[:depth] in fresh for depth in depths)

    if not fresh or (all(map(stays, flat.tensor_paths)) and all(map(stays, flat.object_paths))):
        return flat
    return flat.only(stays)


def _first_name(name: str | None, own: str | None, number: int) -> str:
    return name or own or f"parameter {number}"


def _without_names(
    source: Source, stored: Mapping[Path, str], targets: Sequence[NamedOptimizer], flat: FlatState
) -> Source:
    """A checkpoint without the names: they are no values of an optimizer, and those in its groups stay as they are."""
    dropped, contents = {*stored.values()}, source.contents
    groups = [(*target.path, "param_groups", number) for target in targets for number in range(len(target.names))]
    own = {(*group, NAMES) for group in groups}
    values = {key_of(path): value for path, value in zip(flat.object_paths, flat.objects, strict=True) if path in own}
    paths = {target.path for target in targets}
    for key, entry in contents.objects.items():
        if entry.path[-1] == NAMES and entry.path[-3:-2] == ("param_groups",) and entry.path[:-3] in paths:
            dropped.add(key)
    if not dropped and not values:
        return source
    objects = {key: entry for key, entry in contents.objects.items() if key not in dropped}
    objects.update({key_of(path): Entry(key_of(path), path, "", (), 0, ()) for path in own if key_of(path) in values})
    if values:
        return RenamedSource(source, replace(contents, objects=objects), {}, values)
    narrowed = copy.copy(source)
    narrowed.contents = replace(contents, objects=objects)
    return narrowed
