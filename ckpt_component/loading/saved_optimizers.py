"""The optimizers of a checkpoint: the names of their parameters, and the numbers under which these are stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from ..errors import CheckpointCorruptError
from ..formats.source import Source
from ..state.parameter_names import NAMES, NamedOptimizer, Names
from ..state.paths import Path, key_of
from ..state.wrapped_modules import names_in_other_wrapping

#: A parameter or a group in the checkpoint: the path of its optimizer, and its number there.
SavedParameter = tuple[Path, int]


class SavedOptimizers:
    """The optimizers of a checkpoint.

    Args:
        source: the checkpoint
        stored: keys of the names, by path of the optimizer
        targets: the optimizers of the target
        renamed: returns a parameter's name in the target, from that in the checkpoint

    Attributes:
        source: see above
        names: names of the parameters of each optimizer, by group
        keyed_by_name: optimizers whose state is stored by name, with the number of each name
        group_of: the group of each parameter

    Raises:
        CheckpointCorruptError: names are not in lists by group
    """

    def __init__(
        self,
        source: Source,
        stored: Mapping[Path, str],
        targets: Sequence[NamedOptimizer],
        renamed: Callable[[str], str],
    ) -> None:
        self.source = source
        self._targets = targets
        self.names: dict[Path, Names] = {}
        self.keyed_by_name: dict[Path, dict[Any, int]] = {}
        self.group_of: dict[SavedParameter, int] = {}
        self._by_name: dict[str, list[SavedParameter]] = defaultdict(list)
        values = source.read_objects([*stored.values()])
        for path, key in stored.items():
            self._add(path, [[name and renamed(name) for name in group] for group in _checked(values[key], key)])
        for path in {target.path for target in targets} - self.names.keys():
            groups = _members_by_name(path, source)
            if any(groups):
                self.keyed_by_name[path] = {name: number for number, name in enumerate(chain(*groups))}
                self._add(path, groups)
        self._with_state: dict[Path, set[int]] = {}

    def _add(self, path: Path, names: Names) -> None:
        first = len(self.group_of)
        self.names[path] = names
        for group, members in enumerate(names):
            for name in members:
                place = path, len(self.group_of) - first
                self.group_of[place] = group
                if name is not None:
                    self._by_name[name].append(place)

    def names_of(self, path: Path) -> list[str | None]:
        """The names of an optimizer's parameters, by number."""
        return [*chain(*self.names.get(path, ()))]

    def find(self, path: Path, name: str | None, own: str | None) -> SavedParameter | None:
        """The parameter with a name: of the optimizer at the path, or else of the only other one that has it.

        Args:
            path: path of the target's optimizer
            name: the parameter's name in the target
            own: the name that the target's optimizer was given with it
        """
        # Names that torch gave begin below the module.
        below = _below_modules(name) if name is not None and path in self.keyed_by_name else ()
        for wanted in filter(None, (name, own, *below)):
            places = self._by_name.get(wanted, [])
            here = [place for place in places if place[0] == path]
            if len(here or places) == 1:
                return (here or places)[0]
        places = self._own_names.get(own, []) if own is not None else []
        here = [place for place in places if place[0] == path]
        if len(here) == 1:
            return here[0]
        others = [self._other_names.get(each or "") for each in (name, own)]
        return self.find(path, *others) if any(others) else None

    @cached_property
    def _other_names(self) -> Mapping[str, str]:
        """The names of parameters that were saved with another wrapping, by their names in the target."""
        saved = {*self._by_name, *self._own_names}
        names = {name for target in self._targets for name in chain(*target.names, *target.own) if name is not None}
        return names_in_other_wrapping(names - saved, saved - names)

    @cached_property
    def _own_names(self) -> Mapping[str, list[SavedParameter]]:
        """The parameters by the names that their optimizers were given with them."""
        own: dict[str, list[SavedParameter]] = defaultdict(list)
        for path, groups in self.names.items():
            keys = [key_of((*path, "param_groups", number, NAMES)) for number in range(len(groups))]
            values = self.source.read_objects([key for key in keys if key in self.source.contents.objects])
            number = 0
            for key, group in zip(keys, groups, strict=True):
                for position in range(len(group)):
                    if key in values and position < len(values[key]):
                        own[values[key][position]].append((path, number))
                    number += 1
        return own

    def has_state(self, path: Path) -> bool:
        """Whether the checkpoint has state of any parameter of an optimizer."""
        return bool(self.numbers_with_state(path))

    def numbers_with_state(self, path: Path) -> set[int]:
        """The numbers of an optimizer's parameters that have state in the checkpoint."""
        if path not in self._with_state:
            depth, contents = len(path), self.source.contents
            paths = (entry.path for entries in (contents.tensors, contents.objects) for entry in entries.values())
            within = (each for each in paths if each[depth : depth + 1] == ("state",) and each[:depth] == path)
            numbers = {self.number_of(path, each[depth + 1]) for each in within}
            self._with_state[path] = {number for number in numbers if number is not None}
        return self._with_state[path]

    def number_of(self, path: Path, part: Any) -> int | None:
        """The number of the parameter whose state is below a part of a path; None: it is not a parameter's."""
        by_name = self.keyed_by_name.get(path)
        return number_in(part) if by_name is None else by_name.get(part)


def _checked(value: Any, key: str) -> Names:
    """The names from a checkpoint.

    Raises:
        CheckpointCorruptError: they are in another form
    """
    is_valid = isinstance(value, list) and all(isinstance(group, list) for group in value)
    if not is_valid or not all(name is None or isinstance(name, str) for group in value for name in group):
        raise CheckpointCorruptError(f"'{key}' is {value!r:.100}; it should have a list of names for each group.")
    names: Names = value
    return names


def _members_by_name(path: Path, source: Source) -> Names:
    """The parameters in the groups of an optimizer whose state is stored by name; empty: it is by number."""
    keys = [key_of((*path, "param_groups", number, "params")) for number in range(_count_groups(path, source))]
    groups = source.read_objects([key for key in keys if key in source.contents.objects]).values()
    is_named = all(isinstance(group, list) and all(isinstance(each, str) for each in group) for group in groups)
    return [[*group] for group in groups] if is_named and len(groups) == len(keys) else []


def _count_groups(path: Path, source: Source) -> int:
    groups, depth = (*path, "param_groups"), len(path) + 1
    numbers = {
        number_in(entry.path[depth]) for entry in source.contents.objects.values() if entry.path[:depth] == groups
    }
    return len(numbers - {None})


def _below_modules(name: str) -> list[str]:
    """A name without its first part, its first two parts, and so on."""
    parts = name.split(".")
    return [".".join(parts[depth:]) for depth in range(1, len(parts))]


def number_in(part: Any) -> int | None:
    """A part of a path as a number; stock DCP makes every key a string."""
    if type(part) is int:
        return part
    return int(part) if isinstance(part, str) and part.isdecimal() else None
