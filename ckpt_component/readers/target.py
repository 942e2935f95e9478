"""What a load has to fill: matches a target state dict with what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import repeat
from operator import itemgetter
from typing import Any

import torch

from ..errors import CheckpointLoadError
from ..memory.int_columns import rows_of
from ..state.batches import parts
from ..state.flatten import Path, StateDict, Stateful, flatten, key_of, keys_of, unflatten
from ..state.per_rank import PerRank, rank_of
from ..state.shards import Shard, local_part
from .fillable import addresses_if_alike, check_fillable
from .forms import Forms, owner_of
from .object_state import object_state
from .source import Request, Source, copy_into


class Target:
    """The plan of one load into `state_dict`.

    - A tensor is copied into in place. A plain value is replaced, also by a whole subtree of the checkpoint.
    - An empty dict takes all that the checkpoint has under its key.
    - An object with `load_state_dict` is given its whole subtree; tensors that it has already are filled in place.

    Attributes:
        unexpected: keys of the checkpoint that the target has no place for.
        shortens_lists: some of them are elements of lists that the target has, and that are longer in the checkpoint.
        requests: tensors to fill in place.
        new_tensors: keys of tensors to load into new memory.
        objects: keys of objects to load.

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

        self._flat = flatten(state_dict, owner)
        self._stateful: list[tuple[Path, Stateful]] = _outermost(self._flat.stateful)
        self._forms = Forms(state_dict, self._flat, source, [path for path, _ in self._stateful], owners)
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
        self.new_tensors: list[str] = []
        self.objects: list[str] = []
        #: Keys of tensors of which other ranks load all.
        self._elsewhere = set(keys_of([*self._flat.elsewhere]))
        self._forms.check_containers()
        self._match_tensors()
        self._missing += self._elsewhere - source.index.tensors.keys()
        for path in self._flat.object_paths:
            self._match_value(path)
        for path, kind in self._flat.containers:
            if kind == "empty" and path and self._forms.owner(path) is None:
                self._match_value(path, may_miss=True)
        for path, stateful in self._stateful:
            self._compare_with_object(path)
            self._take_rest(path, stateful)
        self.new_tensors = list(dict.fromkeys(self.new_tensors))
        self.objects = list(dict.fromkeys(self.objects))
        index = source.index
        used = {*map(itemgetter(0), self.requests), *self.new_tensors, *self.objects}
        used |= self._elsewhere & index.tensors.keys()
        # Keys of the checkpoint alone are used, so their number tells whether some are left.
        complete = len(used) == len(index.tensors) + len(index.objects)
        unused = set() if complete else (index.tensors.keys() | index.objects.keys()) - used
        # Every rank finds the others' own values there.
        self.unexpected = sorted(key for key in unused if all(rank_of(part) is None for part in self._place_of(key)))
        lists = {path for path, kind in self._flat.containers if kind == "list"}
        places = map(self._place_of, self.unexpected if lists else ())
        self.shortens_lists = any(place[:depth] in lists for place in places for depth in range(1, len(place)))

    def _match_tensors(self) -> None:
        """All tensors, of which there may be a hundred thousand: at once where all of them fit as they are."""
        flat = self._flat
        keys = keys_of(flat.tensor_paths)
        entries = list(map(self._source.index.tensors.get, keys))
        if None not in entries and not any(flat.shards):
            requests: list[Request] = []
            for start, part in parts(flat.tensors):
                mine = slice(start, start + len(part))
                addresses = addresses_if_alike(entries[mine], part)
                if addresses is None:
                    break
                requests += rows_of(Request, keys[mine], part, repeat(None), addresses)
            else:
                self.requests = requests
                return
        for path, tensor, shard in zip(flat.tensor_paths, flat.tensors, flat.shards, strict=True):
            self._match_tensor(path, tensor, shard)

    def _match_tensor(self, path: Path, tensor: torch.Tensor, shard: Shard | None) -> None:
        key = key_of(path)
        check_fillable(tensor, key)
        entry = self._source.index.tensors.get(key)
        if entry is None:
            if key in self._source.index.objects:
                raise CheckpointLoadError(f"'{key}' is a tensor in the target and a Python object in the checkpoint.")
            if self._forms.owner(path) is None:
                self._look_elsewhere(path)
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
            # Values of another dtype are loaded aside and converted by the copy in `finish`.
            self.new_tensors.append(key)
            self._converted.append(request)

    def _match_value(self, path: Path, *, may_miss: bool = False) -> None:
        key, index = key_of(path), self._source.index
        if self._forms.owner(path) is None:
            self._forms.check(path)
            if key in index.objects:
                self._compared[path] = path
        if key in index.objects or key in index.tensors:
            self._use(path, [key])
        elif key in self._forms.below or key in self._forms.empty:
            self._use(path, self._forms.below.get(key, []))
        else:
            self._look_elsewhere(path, may_miss=may_miss)

    def _look_elsewhere(self, path: Path, *, may_miss: bool = False) -> None:
        """What to do about a place of the target that the checkpoint has no key for."""
        if self._forms.owner(path) is None:
            self._forms.check(path)
        above = self._forms.object_above(path)
        if above is not None:
            self.objects.append(key_of(above))
            self._inside[path] = above
        elif not may_miss:
            self._missing.append(key_of(path))

    def _compare_with_object(self, path: Path) -> None:
        """Let what the checkpoint has at an object's place, or around it, be compared, where that is one value."""
        above = path if key_of(path) in self._source.index.objects else self._forms.object_above(path)
        if above is not None:
            self.objects.append(key_of(above))
            self._compared[path] = above

    def _use(self, path: Path, keys: list[str]) -> None:
        self._replaced[path] = keys
        for key in keys:
            (self.objects if key in self._source.index.objects else self.new_tensors).append(key)

    def _take_rest(self, path: Path, stateful: Stateful) -> None:
        """What the checkpoint has for an object beyond what its state has now, such as an optimizer's state."""
        known = {request.key for request in [*self.requests, *self._converted]} | self._elsewhere
        known.update(key for keys in self._replaced.values() for key in keys)
        for key in self._forms.below.get(key_of(path), []):
            if key not in known and not self._take_as_part(path, stateful, key):
                self._use(self._place_of(key), [key])

    def _take_as_part(self, path: Path, stateful: Stateful, key: str) -> bool:
        """Load what an optimizer keeps for a sharded parameter as the same part of the whole as the parameter's."""
        entry = self._source.index.tensors.get(key)
        if entry is None or not isinstance(stateful, torch.optim.Optimizer):
            return False
        parameter = _parameter_of(stateful, entry.path[len(path) :])
        if parameter is None or parameter.shape != entry.shape:
            return False
        local, shard = local_part(parameter, key)
        if local is parameter:
            return False
        made = torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
        offsets = None if shard is None else shard.offsets
        self.requests.append(Request.into(key, local_part(made, key)[0], offsets))
        self._made[entry.path] = made
        return True

    def _place_of(self, key: str) -> Path:
        entry = self._source.index.tensors.get(key)
        return self._source.index.objects[key] if entry is None else entry.path

    def check(self, fresh: Mapping[str, Any]) -> None:
        """Refuse objects of the checkpoint of another form than the target's, before anything is changed.

        Args:
            fresh: what was read of `new_tensors` and `objects`.

        Raises:
            CheckpointLoadError: with the key.
        """
        for path, above in {**self._compared, **self._inside}.items():
            self._forms.descend(path, above, fresh[key_of(above)])

    def finish(self, fresh: Mapping[str, Any]) -> list[str]:
        """Put the new values in, and give the objects their state; returns the keys that the checkpoint lacks."""
        values: dict[Path, Any] = dict(self._made)
        values.update((path, self._assemble(path, keys, fresh)) for path, keys in self._replaced.items())
        for request in self._converted:
            copy_into(request.destination, request.part_of(fresh[request.key]), request.key)
        for path, above in self._inside.items():
            found, value = self._forms.descend(path, above, fresh[key_of(above)])
            if found:
                if above not in values:  # else an object takes all of it
                    values[path] = value
            else:
                self._missing.append(key_of(path))
        for path, value in values.items():
            if self._forms.owner(path) is None:
                _set(self._state_dict, path, value)
        missing = frozenset(self._missing)
        for path, stateful in self._stateful:
            self._give_back(path, stateful, values, missing)
        return sorted(missing)

    def _assemble(self, path: Path, keys: list[str], fresh: Mapping[str, Any]) -> Any:
        if keys == [key_of(path)]:
            return fresh[keys[0]]
        depth = len(path)
        inner = {self._place_of(key)[depth:]: fresh[key] for key in keys}
        containers = [(place[depth:], kind) for place, kind in self._source.index.containers if place[:depth] == path]
        root = "root"  # a list at the very top is put into a dict, because unflatten gives back a dict
        lifted = {(root, *place): value for place, value in inner.items()}
        return unflatten(lifted, [((root, *place), kind) for place, kind in containers])[root]

    def _give_back(self, path: Path, stateful: Stateful, values: Mapping[Path, Any], missing: Collection[str]) -> None:
        try:
            state = object_state(path, self._flat, self._source, self._forms, values, missing)
            stateful.load_state_dict(_with_parameter_numbers(stateful, state))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointLoadError(
                f"'{key_of(path)}' ({type(stateful).__name__}) did not take its state from "
                f"{self._source.where}: {error}"
            ) from error


def _with_parameter_numbers(stateful: Stateful, state: StateDict) -> StateDict:
    """An optimizer's state is keyed by number; stock DCP turns every key into text."""
    if isinstance(stateful, torch.optim.Optimizer) and isinstance(state.get("state"), dict):
        state["state"] = {
            int(key) if isinstance(key, str) and key.isdigit() else key: value for key, value in state["state"].items()
        }
    return state


def _parameter_of(optimizer: torch.optim.Optimizer, way: Path) -> torch.Tensor | None:
    """The parameter that an entry of an optimizer's state, such as `state.3.exp_avg`, belongs to."""
    if len(way) != 3 or way[0] != "state" or not str(way[1]).isdigit():
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    number = int(way[1])
    return parameters[number] if number < len(parameters) else None


def _outermost(found: list[tuple[Path, Stateful]]) -> list[tuple[Path, Stateful]]:
    """Objects that are not inside the state of another object: the outer one restores what is inside."""
    places = {path for path, _ in found}
    return [(path, value) for path, value in found if not any(path[:depth] in places for depth in range(1, len(path)))]


def _set(root: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        root = root.value if isinstance(root, PerRank) else root[part]
    if isinstance(root, PerRank):
        root.value = value
    else:
        root[path[-1]] = value
