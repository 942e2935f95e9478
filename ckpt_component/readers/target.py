"""What a load has to fill: matches a target state dict with what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointLoadError
from ..memory.int_columns import rows_of
from ..state.dense_tensors import TOGETHER, plain_addresses
from ..state.flatten import Path, StateDict, Stateful, flatten, key_of, keys_of, kind_of, unflatten
from ..state.per_rank import PerRank, rank_name, rank_of
from ..state.shards import Shard, local_part
from .source import Index, Request, Source, TensorEntry, copy_into

_NOTHING = object()


class Target:
    """The plan of one load into `state_dict`.

    - A tensor is copied into in place. A plain value is replaced, also by a whole subtree of the checkpoint.
    - An empty dict takes all that the checkpoint has under its key.
    - An object with `load_state_dict` is given its whole subtree; tensors that it has already are filled in place.

    Attributes:
        unexpected: keys of the checkpoint that the target has no place for.
        shortens_lists: some of them are elements of lists that the target has, and that are longer in the checkpoint.
        requests: tensors to fill in place.
        new_tensors: keys of tensors to load into new memory; none twice.
        objects: keys of objects to load; none twice.

    Raises:
        CheckpointLoadError: a value of another shape, dtype or kind than the checkpoint's.
    """

    def __init__(
        self, state_dict: StateDict, source: Source, rank: int, world_size: int, *, allow_dtype_cast: bool
    ) -> None:
        self._state_dict = state_dict
        self._source = source
        self._allow_dtype_cast = allow_dtype_cast
        owners: dict[Path, int | None] = {}

        def owner(path: Path, own: PerRank) -> int | None:
            owners[path] = owner_of(path, own, source, rank, world_size)
            return owners[path]

        self._flat = flat = flatten(state_dict, owner)
        #: Objects that are given their state; the outer one restores those inside its own.
        self._stateful: dict[Path, Stateful] = {}
        for path, stateful in flat.stateful:
            if not any(path[:depth] in self._stateful for depth in range(1, len(path))):
                self._stateful[path] = stateful
        self._forms = Forms(state_dict, source, self._stateful, owners)
        self._missing: list[str] = []
        #: For every place of a plain value: the keys that make up its new value.
        self._replaced: dict[Path, list[str]] = {}
        #: For every place inside an object of the checkpoint: where that object stands.
        self._inside: dict[Path, Path] = {}
        #: The same for places whose form alone is to be compared.
        self._compared: dict[Path, Path] = {}
        self._converted: list[Request] = []
        #: Sharded tensors that the target did not have yet.
        self._made: dict[Path, torch.Tensor] = {}
        self.requests: list[Request] = []
        self._new: dict[str, None] = {}
        #: Keys of tensors of which other ranks load all.
        self._elsewhere = set(keys_of([*flat.elsewhere]))
        self._check_containers()
        self._match_tensors()
        self._missing += self._elsewhere - source.index.tensors.keys()
        for path in flat.object_paths:
            self._match_value(path)
        for path, kind in flat.containers:
            if kind == "empty" and path and self._forms.owner(path) is None:
                self._match_value(path, may_miss=True)
        self._match_objects()
        index = source.index
        self.new_tensors = [key for key in self._new if key in index.tensors]
        self.objects = [key for key in self._new if key in index.objects]
        used = {request.key for request in self.requests} | self._new.keys() | (self._elsewhere & index.tensors.keys())
        # Keys of the checkpoint alone are used, so their count shows whether some are left.
        complete = len(used) == len(index.tensors) + len(index.objects)
        unused = {} if complete else {key: path for key, path in _paths(index) if key not in used}
        # Every rank finds the others' own values there.
        self.unexpected = sorted(key for key, path in unused.items() if all(rank_of(part) is None for part in path))
        lists = {path for path, kind in flat.containers if kind == "list"}
        self.shortens_lists = bool(lists) and any(
            unused[key][:depth] in lists for key in self.unexpected for depth in range(1, len(unused[key]))
        )

    def _check_containers(self) -> None:
        """Refuse a list of the one where the other has something else, and what has no state where an object stands."""
        lists = [path for path, kind in self._flat.containers if kind == "list"]
        containers = [path for path, kind in self._source.index.containers if kind != "odict"]
        for path in [*lists, *containers]:
            if self._forms.owner(path) is None:
                self._forms.check(path)
        for path in self._stateful:
            self._forms.check(path)

    def _match_tensors(self) -> None:
        """Match all tensors, of which there may be a hundred thousand: at once where all of them fit as they are."""
        flat = self._flat
        keys = keys_of(flat.tensor_paths)
        entries = list(map(self._source.index.tensors.get, keys))
        if None not in entries and not any(flat.shards):
            for first in range(0, len(keys), TOGETHER):
                some = slice(first, first + TOGETHER)
                addresses = _addresses_if_alike(entries[some], flat.tensors[some])
                if addresses is None:
                    self.requests = []
                    break
                self.requests += rows_of(Request, keys[some], flat.tensors[some], repeat(None), addresses)
            else:
                return
        for row in zip(keys, flat.tensor_paths, flat.tensors, flat.shards, entries, strict=True):
            self._match_tensor(*row)

    def _match_tensor(
        self, key: str, path: Path, tensor: torch.Tensor, shard: Shard | None, entry: TensorEntry | None
    ) -> None:
        reason = why_unfillable(tensor)
        if reason is not None:
            raise CheckpointLoadError(f"'{key}' in the target {reason}.")
        if entry is None:
            if key in self._source.index.objects:
                raise CheckpointLoadError(f"'{key}' is a tensor in the target and a Python object in the checkpoint.")
            if self._forms.owner(path) is None:
                self._match_inside_object(path)
            else:
                self._missing.append(key)
            return
        shape = tensor.shape if shard is None else shard.shape
        if entry.shape != shape:
            raise CheckpointLoadError(
                f"'{key}' has shape {tuple(shape)} in the target and {entry.shape} in the checkpoint "
                f"{self._source.where}."
            )
        if entry.dtype != tensor.dtype and not self._allow_dtype_cast:
            raise CheckpointLoadError(
                f"'{key}' is {tensor.dtype} in the target and {entry.dtype} in the checkpoint {self._source.where}; "
                "pass allow_dtype_cast=True to convert it."
            )
        request = Request.into(key, tensor, None if shard is None else shard.offsets)
        if entry.dtype == tensor.dtype:
            self.requests.append(request)
        else:
            # Values of another dtype are loaded into new memory and converted by the copy in `finish`.
            self._new[key] = None
            self._converted.append(request)

    def _match_value(self, path: Path, *, may_miss: bool = False) -> None:
        key, index = key_of(path), self._source.index
        if self._forms.owner(path) is None:
            self._forms.check(path)
            if key in index.objects:
                self._compared[path] = path
        if key in index.objects or key in index.tensors:
            self._replace(path, [key])
        elif self._forms.has_container(path):
            self._replace(path, self._forms.below.get(key, []))
        else:
            self._match_inside_object(path, may_miss=may_miss)

    def _match_inside_object(self, path: Path, *, may_miss: bool = False) -> None:
        """Match a place that the checkpoint has no key for with what an object around it may have there."""
        if self._forms.owner(path) is None:
            self._forms.check(path)
        above = self._forms.object_above(path)
        if above is not None:
            self._new[key_of(above)] = None
            self._inside[path] = above
        elif not may_miss:
            self._missing.append(key_of(path))

    def _replace(self, path: Path, keys: list[str]) -> None:
        self._replaced[path] = keys
        self._new.update(dict.fromkeys(keys))

    def _match_objects(self) -> None:
        """Take what the checkpoint has for objects beyond their present state, such as an optimizer's state."""
        index = self._source.index
        if not self._stateful:
            return
        used = {request.key for request in [*self.requests, *self._converted]} | self._elsewhere
        for keys in self._replaced.values():
            used.update(keys)
        for path, stateful in self._stateful.items():
            above = path if key_of(path) in index.objects else self._forms.object_above(path)
            if above is not None:
                self._new[key_of(above)] = None
                self._compared[path] = above
            for key in self._forms.below.get(key_of(path), []):
                if key not in used and not self._match_as_part(path, stateful, key):
                    self._replace(index.path_of(key), [key])

    def _match_as_part(self, path: Path, stateful: Stateful, key: str) -> bool:
        """Load what an optimizer keeps for a sharded parameter as the same part of the whole as the parameter's."""
        entry = self._source.index.tensors.get(key)
        if entry is None or not isinstance(stateful, torch.optim.Optimizer):
            return False
        relative = entry.path[len(path) :]  # such as state.3.exp_avg
        if len(relative) != 3 or relative[0] != "state" or not str(relative[1]).isdigit():
            return False
        parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
        number = int(relative[1])
        if number >= len(parameters) or parameters[number].shape != entry.shape:
            return False
        parameter = parameters[number]
        local, shard = local_part(parameter, key)
        if local is parameter:
            return False
        made = torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
        offsets = None if shard is None else shard.offsets
        self.requests.append(Request.into(key, local_part(made, key)[0], offsets))
        self._made[entry.path] = made
        return True

    def check(self, loaded: Mapping[str, Any]) -> None:
        """Refuse objects of the checkpoint of another form than the target's, before anything is changed.

        Args:
            loaded: what was read of `new_tensors` and `objects`.

        Raises:
            CheckpointLoadError: with the key.
        """
        for path, above in {**self._compared, **self._inside}.items():
            self._forms.compare(path, above, loaded[key_of(above)])

    def finish(self, loaded: Mapping[str, Any]) -> list[str]:
        """Put the new values in, and give the objects their state; returns the keys that the checkpoint lacks."""
        values: dict[Path, Any] = dict(self._made)
        for path, keys in self._replaced.items():
            values[path] = loaded[keys[0]] if keys == [key_of(path)] else self._assemble(path, keys, loaded)
        for request in self._converted:
            copy_into(request.destination, request.part_of(loaded[request.key]), request.key)
        for path, above in self._inside.items():
            exists, value = self._forms.compare(path, above, loaded[key_of(above)])
            if not exists:
                self._missing.append(key_of(path))
            elif above not in values:  # else an object takes all of it
                values[path] = value
        for path, value in values.items():
            if self._forms.owner(path) is None:
                _set(self._state_dict, path, value)
        for path, stateful in self._stateful.items():
            try:
                state = self._object_state(path, values)
                if isinstance(stateful, torch.optim.Optimizer) and isinstance(state.get("state"), dict):
                    # It is keyed by number; stock DCP turns every key into text.
                    state["state"] = {
                        int(key) if isinstance(key, str) and key.isdigit() else key: value
                        for key, value in state["state"].items()
                    }
                stateful.load_state_dict(state)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise CheckpointLoadError(
                    f"'{key_of(path)}' ({type(stateful).__name__}) did not take its state from "
                    f"{self._source.where}: {error}"
                ) from error
        return sorted(set(self._missing))

    def _assemble(self, path: Path, keys: list[str], loaded: Mapping[str, Any]) -> Any:
        """The subtree of the checkpoint at a place."""
        depth, index = len(path), self._source.index
        root = ("root",)  # a list at the very top is put into a dict, because unflatten gives back a dict
        values = {root + index.path_of(key)[depth:]: loaded[key] for key in keys}
        containers = [(root + place[depth:], kind) for place, kind in index.containers if place[:depth] == path]
        return unflatten(values, containers)[root[0]]

    def _object_state(self, path: Path, values: Mapping[Path, Any]) -> StateDict:
        """The state that an object is given: what the checkpoint has, and what the object has beside it.

        What the checkpoint lacks keeps its value, where there is a place left for it.

        Args:
            path: where the object stands. Its tensors that the checkpoint has are filled already.
            values: what was loaded beside those, by path.

        Raises:
            TypeError: the two make up no state.
        """
        depth, flat, forms, missing = len(path), self._flat, self._forms, set(self._missing)
        new = {place[depth:]: value for place, value in values.items() if place[:depth] == path}
        own_containers = [(place, kind) for place, kind in flat.containers if place[:depth] == path]
        own_lists = {place for place, kind in own_containers if kind == "list"}
        tensors = [flat.placed.get(number, tensor) for number, tensor in enumerate(flat.tensors)]
        present = [*zip(flat.tensor_paths, tensors, strict=True), *zip(flat.object_paths, flat.objects, strict=True)]
        state: dict[Path, Any] = {}
        for place, value in [*present, *flat.elsewhere.items()]:
            if place[:depth] != path:
                continue
            if missing and key_of(place) in missing:
                # No element of a list that the checkpoint has is kept, and nothing in the way of what is new.
                around = [place[:length] for length in range(depth + 1, len(place))]
                if key_of(place) in forms.below or any(
                    outer[depth:] in new
                    or (forms.has_container(outer) and (outer in own_lists or key_of(outer) in forms.lists))
                    for outer in around
                ):
                    continue
            state[place[depth:]] = value
        state.update(new)
        containers = {
            place[depth:]: kind for place, kind in own_containers if kind != "list" or not forms.has_container(place)
        }
        containers.update(
            (place[depth:], kind) for place, kind in self._source.index.containers if place[:depth] == path
        )
        filled = {place[:length] for place in state for length in range(1, len(place) + 1)}
        kept = [
            (place, kind)
            for place, kind in containers.items()
            if (kind != "empty" or place not in filled)
            # A value that was loaded as a whole has its containers already.
            and not any(place[:length] in new for length in range(1, len(place) + 1))
        ]
        return unflatten(state, kept)


def why_unfillable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be filled, and what to do; None: it can."""
    if is_lazy(tensor):
        return "is not initialized yet; run the module on one batch before the load"
    if tensor.is_meta:
        return "is on the meta device and has no memory; give the module memory with to_empty(device=...)"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"is {'nested' if tensor.is_nested else f'sparse ({tensor.layout})'}; load into a dense tensor"
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: several of its elements are the same memory; load into its .contiguous()"
    return None


def _addresses_if_alike(
    entries: Sequence[TensorEntry | None], tensors: Sequence[torch.Tensor]
) -> list[int | None] | None:
    """Where the memory of tensors begins, as `plain_addresses`; None: they must be matched one by one.

    That is when one is of another shape or dtype than its entry, or has no memory that can simply be filled.
    """
    try:
        for column in map(attrgetter, ("shape", "dtype")):
            if list(map(column, entries)) != list(map(column, tensors)):
                return None
        addresses = plain_addresses(tensors)
        if None in addresses:
            for tensor, address in zip(tensors, addresses, strict=True):
                if address is None and why_unfillable(tensor) is not None:
                    return None
    except RuntimeError:  # it has no shape at all
        return None
    return addresses


def _set(root: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        root = root.value if isinstance(root, PerRank) else root[part]
    if isinstance(root, PerRank):
        root.value = value
    else:
        root[path[-1]] = value


class Forms:
    """What a target and a checkpoint have where, and the errors for what does not fit.

    A plain value of the target takes anything. A dict, list, tuple, set or tensor, or an object that is given its
    state, takes its like alone. The state of an object is that object's own business.

    Args:
        state_dict: the target.
        source: the checkpoint.
        objects: where the target's objects with a state stand, the outer ones alone.
        owners: whose value each `PerRank` takes, by its path.

    Attributes:
        lists: keys of lists of the checkpoint.
        empty: keys of empty dicts of the checkpoint.
    """

    def __init__(
        self, state_dict: StateDict, source: Source, objects: Collection[Path], owners: Mapping[Path, int | None]
    ) -> None:
        self._state_dict = state_dict
        self._source = source
        self._objects = frozenset(objects)
        self._owners = owners
        containers = source.index.containers
        self.lists = {key_of(path) for path, kind in containers if kind == "list"}
        self.empty = {key_of(path) for path, kind in containers if kind == "empty" and path}

    @cached_property
    def below(self) -> dict[str, list[str]]:
        """For every inner node of the checkpoint, the keys below it."""
        below: dict[str, list[str]] = {}
        nodes: dict[Path, list[list[str]]] = {}  # by the path of a container: the lists that its keys belong to
        for key, path in _paths(self._source.index):
            parent = path[:-1]
            if parent not in nodes:
                nodes[parent] = [below.setdefault(key_of(parent[:depth]), []) for depth in range(1, len(path))]
            for keys in nodes[parent]:
                keys.append(key)
        return below

    def owner(self, path: Path) -> Path | None:
        """The place of the target's object whose state a path is in."""
        if self._objects:
            for depth in range(1, len(path) + 1):
                if path[:depth] in self._objects:
                    return path[:depth]
        return None

    def has_container(self, path: Path) -> bool:
        """Whether the checkpoint has a dict or a list of values at a place."""
        key = key_of(path)
        return key in self.empty or key in self.below

    def check(self, path: Path) -> None:
        """Refuse another form at a place of the target, as far as it is known without reading; see `compare`.

        Raises:
            CheckpointLoadError: with the key.
        """
        there, key = None, key_of(path)
        if key in self._source.index.tensors:
            there = "tensor"
        elif key in self.lists:
            there = "list"
        elif key in self.empty or (key not in self._source.index.objects and key in self.below):
            there = "dict"
        if there is not None and _form(self._target_value(path)) not in (None, there):
            raise self._mismatch(path, there)

    def object_above(self, path: Path) -> Path | None:
        """Where an object of the checkpoint stands that a place of the target may be inside of.

        Raises:
            CheckpointLoadError: a tensor stands there.
        """
        index, owner = self._source.index, self.owner(path)
        for depth in range(len(path) - 1, 0, -1):
            above = key_of(path[:depth])
            if above in index.objects:
                return path[:depth]
            if above in index.tensors and (owner is None or depth <= len(owner)):
                raise self._mismatch(path[:depth], "tensor")
        return None

    def compare(self, path: Path, above: Path, value: Any) -> tuple[bool, Any]:
        """Compare a place of the target with an object that was read.

        Args:
            path: of the target.
            above: where the object stands.
            value: the object.

        Returns:
            Whether the object has something for the place, and what.

        Raises:
            CheckpointLoadError: it is of another form, there or on the way.
        """
        owner = self.owner(path)
        for depth in range(len(above), len(path) + 1):
            here = _form(self._target_value(path[:depth]))
            outside = owner is None or depth <= len(owner)
            if outside and value is not None and here not in (None, _form(value)):  # None is as nothing
                raise self._mismatch(path[:depth], type(value).__name__)
            if depth == len(path):
                return value is not None or here != "tensor", value
            if not isinstance(value, (Mapping, list, tuple)):
                break
            try:
                value = value[path[depth]]
            except (KeyError, IndexError, TypeError):
                break
        return False, None

    def _target_value(self, path: Path) -> Any:
        """What the target has at a place, outside of the state of its objects."""
        value: Any = self._state_dict
        for depth, part in enumerate(path):
            if isinstance(value, PerRank):
                owner = self._owners.get(path[:depth])
                if owner is None or part != rank_name(owner):
                    return _NOTHING
                value = value.value
                continue
            # Stock DCP turns every dict key into text.
            for name in (part, int(part)) if isinstance(part, str) and part.isdecimal() else (part,):
                in_list = isinstance(value, list) and type(name) is int and 0 <= name < len(value)
                if in_list or (kind_of(value) == "dict" and name in value):
                    value = value[name]
                    break
            else:
                return _NOTHING
        return value

    def _mismatch(self, path: Path, there: str) -> CheckpointLoadError:
        value = self._target_value(path)
        here = _form(value)
        here = type(value).__name__ if here in (None, "dict") else here
        return CheckpointLoadError(
            f"'{key_of(path)}' is of type {here} in the target and of type {there} in the checkpoint "
            f"{self._source.where}; give a target of that form, or None to take what the checkpoint has."
        )


def _form(value: Any) -> str | None:
    """What takes its like alone; None for a plain value."""
    kind = kind_of(value)
    if kind in ("tensor", "list"):
        return kind
    if kind in ("dict", "stateful"):  # the state of an object is a dict
        return "dict"
    if isinstance(value, list):
        return "list"
    return type(value).__name__ if type(value) in (tuple, set) else None


def owner_of(path: Path, own: PerRank, source: Source, rank: int, world_size: int) -> int | None:
    """Whose value a rank takes: its own, that of rank 0, or none, when the checkpoint is of another number of ranks."""
    depth = len(path)
    names = {place[depth] for _, place in _paths(source.index) if place[:depth] == path and len(place) > depth}
    saved = {number for number in map(rank_of, names) if number is not None}
    if not saved or (len(saved) == world_size and rank in saved):
        return rank
    if own.when_resized == "error":
        raise CheckpointLoadError(
            f"'{key_of(path)}' is every rank's own; {source.where} has it of {len(saved)} ranks, and there are "
            f"{world_size} now. PerRank(..., when_resized='keep') leaves it as it is, 'first' takes that of rank 0."
        )
    return None if own.when_resized == "keep" else min(saved)


def _paths(index: Index) -> Iterator[tuple[str, Path]]:
    """All keys of a checkpoint, each with its path."""
    for key, entry in index.tensors.items():
        yield key, entry.path
    yield from index.objects.items()
