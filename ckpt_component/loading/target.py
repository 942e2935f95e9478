"""Plan a load: match a target state dict with the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from ..formats.foreign import RefusedObject
from ..formats.index import Entry, rows_of
from ..formats.source import (
    DTYPE_NAMES,
    ON_META,
    MappedSource,
    Request,
    Source,
    addresses_if_matching,
    copy_into,
    memory_of,
    why_unfillable,
)
from ..state.flatten import StateDict, Stateful, flatten
from ..state.frozen_weights import FrozenWeights
from ..state.paths import CONTEXT, FROZEN, Path, PerRank, key_of, keys_of, rank_of
from ..state.shards import Shard, local_part, mesh_of
from ..state.wrapped_modules import QuantDescription
from .frozen_base import FrozenBase
from .kinds import Kinds, owner_of
from .made_tensors import match_made_tensors, whole_values
from .meta_tensors import MetaTensors
from .mismatch import Misfit, Mismatches
from .object_state import emptied, load_state, nested_value, plain_now, refill, state_of_object, takes_only_its_own_keys
from .optimizer_match import match_optimizers
from .proof import Proof
from .target_values import (
    HandedValues,
    TupleFit,
    parameter_of,
    refuse_other_descriptions,
    refuse_other_quantization,
    under_names_of_target,
    with_parts_to_fill,
)


class Target:
    """The plan of one load into `state_dict`.

    - A tensor is filled in place. A plain value is replaced, possibly by a whole subtree of the checkpoint.
    - An empty dict receives everything that the checkpoint has under its key.
    - An object with `load_state_dict` receives its whole subtree; tensors that it already has are filled in place.

    Attributes:
        source: the checkpoint, under the target's names and with the state of optimizers under its numbers
        notes: what was found under other names or numbers, or not at all, a sentence each, to log
        mismatches: values that have a different shape, dtype or kind in the checkpoint
        unexpected: keys of the checkpoint that have no place in the target
        shortens_lists: whether some of these are elements of lists or tuples that are shorter in the target
        frozen: the parameters that the checkpoint has digests of, and not their values; None: there are none
        requests: tensors to fill in place
        new_tensors: keys of tensors to load into new memory, without duplicates
        objects: keys of objects to load, without duplicates
        on_meta: keys of tensors of modules that are on the meta device, and get memory from `make_memory`

    Args:
        modules: modules whose state `state_dict` has under its own keys
        device: as for `MetaTensors`

    Raises:
        CheckpointLoadError: a `PerRank` value was saved by another number of ranks
    """

    def __init__(
        self,
        state_dict: StateDict,
        source: Source,
        rank: int,
        world_size: int,
        *,
        allow_dtype_cast: bool,
        mapped: MappedSource | None = None,
        modules: Sequence[torch.nn.Module] = (),
        device: torch.device | None = None,
        weights: FrozenWeights | None = None,
    ) -> None:
        self._state_dict = state_dict
        self._modules, self._device = [((), module) for module in modules], device
        self._meta: MetaTensors | None = None
        self.on_meta: set[str] = set()
        self._allow_dtype_cast = allow_dtype_cast
        owners: dict[Path, int | None] = {}

        def owner(path: Path, per_rank: PerRank) -> int | None:
            owners[path] = owner_of(path, per_rank, source, rank, world_size)
            return owners[path]

        renamed = str if mapped is None else mapped.new_name
        source, flat, self.notes = match_optimizers(flatten(state_dict, owner), source, renamed)
        self._modules += [(path, value) for path, value in flat.stateful if isinstance(value, torch.nn.Module)]
        self._weights = weights
        self.frozen: FrozenBase | None = None
        if any(FROZEN in entry.path for entry in source.contents.objects.values()):
            self.frozen = FrozenBase(source, mapped)
            source = self.frozen.without_records(source)
            self.frozen.compare(flat, weights)
        elif weights is not None:
            weights.built(flat, {})
        #: The keys of tensors that stay as they are, because the checkpoint has digests of them.
        self._as_built = frozenset[str]() if self.frozen is None else frozenset(self.frozen.keys)
        keys, contents = keys_of(paths := [*flat.tensor_paths, *flat.object_paths, *flat.elsewhere]), source.contents
        if any(
            key not in contents.tensors and key not in contents.objects for key in keys if key not in self._as_built
        ):
            source, notes = under_names_of_target(source, keys, paths, mapped)
            self.notes = [*self.notes, *notes]
        self.mismatches = Mismatches(source.where)
        if flat.made or any(entry.path[-1] == CONTEXT for entry in source.contents.objects.values()):
            flat, source = match_made_tensors(flat, source, self.mismatches, self._copy_of)
        if flat.quantized:
            flat = with_parts_to_fill(flat)
        self._flat = flat = emptied(flat, source.contents) if flat.mappings else flat
        self.source = self._source = source
        self._kinds = Kinds(state_dict, flat.stateful, owners, source)
        self._missing: list[str] = []
        #: Path of every value to replace -> the keys of the checkpoint that make up the new value.
        self._replaced: dict[Path, list[str]] = {}
        #: Path of every value stored inside an object of the checkpoint -> path of that object.
        self._inside: dict[Path, Path] = {}
        #: The same for paths of which only the form is compared.
        self._compared: dict[Path, Path] = {}
        #: New values by path. Matching already adds sharded tensors that the target lacks; `accept` adds the rest.
        self._values: dict[Path, Any] = {}
        #: Tuples, made of those of the checkpoint and of what the target alone has.
        self._fitted: dict[Path, Any] = {}
        self._converted: list[Request] = []
        #: Descriptions of quantized parameters, by key.
        self._descriptions: dict[str, QuantDescription] = {}
        #: Tensors of another shape, which their objects are given as they are.
        self._handed: HandedValues | None = None
        self.requests: list[Request] = []
        self._new: dict[str, None] = {}
        contents = source.contents
        lists = {path for path, kind in flat.containers if kind == "list"}
        for path in [*lists, *(path for path, kind in contents.containers if path and kind != "odict")]:
            if self._kinds.object_around(path) is None:
                self._check_form(path)
        self._match_tensors()
        #: Keys of tensors whose every element is loaded by other ranks.
        elsewhere = set(keys_of([*flat.elsewhere]))
        # Not of a ShardedTensor, which warns of each use.
        self.on_meta.update(key_of(path) for path, each in flat.elsewhere.items() if mesh_of(each) and each.is_meta)
        self._missing += elsewhere - contents.tensors.keys() - self._as_built
        places = [*flat.object_paths, *(path for path, kind in flat.containers if kind == "empty" and path)]
        around = list(map(self._kinds.object_around, places))
        for number, (path, key) in enumerate(zip(places, keys_of(places), strict=True)):
            is_empty_dict = number >= len(flat.object_paths)
            if around[number] is None or not is_empty_dict:
                try:
                    self._match_value(path, key, outside=around[number] is None, may_miss=is_empty_dict)
                except Misfit as misfit:
                    self.mismatches.add(misfit)
        self._match_objects(elsewhere)
        self.new_tensors = [key for key in self._new if key in contents.tensors]
        self.objects = [key for key in self._new if key in contents.objects]
        used = {request.key for request in self.requests} | self._new.keys() | (elsewhere & contents.tensors.keys())
        self.unexpected: list[str] = []
        self.shortens_lists = False
        # `used` contains only keys of the checkpoint, so the counts show whether some are unused.
        if len(used) < len(contents.tensors) + len(contents.objects):
            for key, path in contents.paths():
                if key not in used and all(rank_of(part) is None for part in path):  # else a PerRank of another rank
                    self.unexpected.append(key)
                    self.shortens_lists |= any(path[:depth] in lists for depth in range(1, len(path)))
            self.unexpected.sort()
        if any(kind.startswith("class ") for _, kind in contents.containers):
            note = plain_now(contents, self._replaced, flat)
            self.notes = [*self.notes, *filter(None, [note])]

    def keys(self) -> list[str]:
        """The keys of the target's values."""
        return keys_of([*self._flat.tensor_paths, *self._flat.object_paths, *self._flat.elsewhere])

    def _match_tensors(self) -> None:
        """Match all tensors, possibly a hundred thousand: all at once if every one fits without conversion."""
        flat = self._flat
        keys = keys_of(flat.tensor_paths)
        entries = list(map(self._source.contents.tensors.get, keys))
        one_by_one = any(flat.shards) or QuantDescription in {*map(type, flat.tensors)}
        addresses = None if one_by_one else addresses_if_matching(entries, flat.tensors)
        if addresses is not None:
            self.requests += rows_of(Request, keys, flat.tensors, repeat(None), addresses)
            return
        for row in zip(keys, flat.tensor_paths, flat.tensors, flat.shards, entries, strict=True):
            if row[0] in self._as_built:
                continue
            try:
                self._match_tensor(*row)
            except Misfit as misfit:
                self.mismatches.add(misfit)
        if self._handed is not None:
            for refused in self._handed.refused():
                self.mismatches.add(refused)

    def _check_form(self, path: Path) -> bool:
        """Whether the target has the checkpoint's form at a path; else it is a mismatch."""
        try:
            self._kinds.check(path)
        except Misfit as misfit:
            self.mismatches.add(misfit)
            return False
        return True

    def _match_tensor(
        self, key: str, path: Path, tensor: torch.Tensor, shard: Shard | None, entry: Entry | None
    ) -> None:
        reason = why_unfillable(tensor)
        if reason is ON_META and self._gets_memory(path, tensor):
            self.on_meta.add(key)
        elif reason is not None:
            fact, _, advice = reason.partition("; ")
            raise Misfit(key, f"'{key}' in the target {fact}", advice)
        if entry is None:
            if key in self._source.contents.objects:
                raise Misfit(key, f"'{key}' is a tensor in the target and a Python object in the checkpoint")
            if self._kinds.object_around(path) is None:
                self._kinds.check(path)
                self._match_inside_object(path, key)
            else:
                self._missing.append(key)
            return
        if isinstance(tensor, QuantDescription):
            self._descriptions[key], self._new[key] = tensor, None
            return
        shape = tensor.shape if shard is None else shard.shape
        if entry.shape != shape or DTYPE_NAMES[tensor.dtype] != entry.dtype:
            refuse_other_quantization(key, self.keys(), self._source.contents.tensors)
        if entry.shape != shape:
            if self._hands_over(path, entry):
                self._replaced[path], self._new[key] = [key], None
                return
            raise Misfit.of_shape(key, shape, entry.shape)
        same = DTYPE_NAMES[tensor.dtype] == entry.dtype
        if not same and not self._allow_dtype_cast:
            raise Misfit.of_dtype(key, tensor.dtype, entry.dtype)
        request = Request.into(key, tensor, None if shard is None else shard.offsets)
        if same:
            self.requests.append(request)
        else:
            # Values of another dtype are loaded into new memory and converted by the copy in `finish`.
            self._new[key] = None
            self._converted.append(request)

    def _hands_over(self, path: Path, entry: Entry) -> bool:
        """Whether a tensor of another shape is given to its object as it is."""
        above = self._kinds.object_around(path)
        module = None if above is None else self._kinds.objects[above]
        if above is None or not isinstance(module, torch.nn.Module):
            return False
        self._handed = self._handed or HandedValues(self._flat)
        return self._handed.takes(module, above, path, entry)

    def _match_value(self, path: Path, key: str, *, outside: bool, may_miss: bool) -> None:
        """Match a plain value or an empty dict. If `outside` of objects' states, its form must match."""
        contents = self._source.contents
        if outside:
            self._kinds.check(path)
        if key in contents.objects or key in contents.tensors:
            self._replaced[path] = [key]
            if outside and key in contents.objects:
                self._compared[path] = path
        elif key in self._kinds.below:
            self._replaced[path] = self._kinds.below[key]
        else:
            self._match_inside_object(path, key, may_miss=may_miss)
        self._new.update(dict.fromkeys(self._replaced.get(path, ())))

    def _match_inside_object(self, path: Path, key: str, *, may_miss: bool = False) -> None:
        """Match a path that has no key in the checkpoint with the stored object that may contain it."""
        above = self._kinds.stored_object_above(path)
        if above is not None:
            self._new[key_of(above)] = None
            self._inside[path] = above
        elif not may_miss:
            self._missing.append(key)

    def _match_objects(self, elsewhere: Iterable[str]) -> None:
        """Match keys that objects do not have yet, such as the state of an optimizer before its first step."""
        contents, objects = self._source.contents, self._kinds.objects
        if not objects:
            return
        used = {request.key for request in [*self.requests, *self._converted]}
        used.update(elsewhere, self._descriptions, *self._replaced.values())
        for (path, stateful), place in zip(objects.items(), keys_of([*objects]), strict=True):
            if not self._check_form(path):
                continue
            above = path if place in contents.objects else self._stored_above(path)
            if above is not None:
                self._new[key_of(above)] = None
                self._compared[path] = above
            unused = [key for key in self._kinds.below.get(place, []) if key not in used]
            if unused and takes_only_its_own_keys(stateful):
                # Refused now, because the module would refuse it when other values are loaded already.
                for key in unused:
                    fact = f"'{key}' in the checkpoint has no place in '{place}' ({type(stateful).__name__})"
                    self.mismatches.add(Misfit(key, fact, "ignore leaves keys out"))
                continue
            for key in unused:
                if not self._match_as_part(path, stateful, key):
                    self._replaced[contents.path_of(key)] = [key]
                    self._new[key] = None

    def _stored_above(self, path: Path) -> Path | None:
        try:
            return self._kinds.stored_object_above(path)
        except Misfit as misfit:
            self.mismatches.add(misfit)
            return None

    def _match_as_part(self, path: Path, stateful: Stateful, key: str) -> bool:
        """Load an optimizer's state of a sharded parameter with the parameter's sharding."""
        entry = self._source.contents.tensors.get(key)
        parameter = None if entry is None else parameter_of(stateful, entry.path[len(path) :])
        if entry is None or parameter is None or parameter.shape != entry.shape:
            return False
        local, shard = local_part(parameter, key)
        if local is parameter:
            return False
        dtype = self._source.dtype_of(entry)
        if parameter.is_meta:
            new = self._meta_tensors().like(parameter, dtype)
        else:
            new = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        offsets = None if shard is None else shard.offsets
        self.requests.append(Request.into(key, local_part(new, key)[0], offsets))
        self._values[entry.path] = new
        return True

    def compare(self, objects: Mapping[str, Any]) -> list[str]:
        """Compare the target with the objects of the checkpoint, which contain some of its values.

        Args:
            objects: the values of `objects`, by key

        Returns:
            All keys of the target that the checkpoint lacks, but not tensors that share their memory with one that it
            has.
        """
        for key, value in objects.items():
            if isinstance(value, RefusedObject):
                fact = f"'{key}' is a {value.kind} in the checkpoint, which safe loading does not create"
                self.mismatches.add(Misfit(key, fact, "take it out of the target, or name it in ignore"))
        tuples: dict[Path, tuple[Any, Any]] = {}
        for path, above in {**self._compared, **self._inside}.items():
            if isinstance(objects[key_of(above)], RefusedObject):
                continue
            try:
                exists, value = self._kinds.compare(path, above, objects[key_of(above)])
            except Misfit as misfit:
                self.mismatches.add(misfit)
                continue
            if path in self._inside:
                if not exists:
                    self._missing.append(key_of(path))
                    continue
                if above in self._replaced:  # that object is taken as a whole
                    continue
                self._values[path] = value
            if type(value) is tuple and (own := self._kinds.own_tuple(path)):
                tuples[path] = own, value
        if tuples:
            self._fit_tuples(tuples)
        if not self._missing:
            return []
        filled = {memory_of(request.destination) for request in [*self.requests, *self._converted]} - {None}
        paths = [
            path
            for path, tensor in zip(self._flat.tensor_paths, self._flat.tensors, strict=True)
            if memory_of(tensor) in filled
        ]
        return sorted(set(self._missing) - set(keys_of(paths)))

    def _fit_tuples(self, tuples: Mapping[Path, tuple[Any, Any]]) -> None:
        """Compare tuples of the target with those of the checkpoint, by path."""
        fit = TupleFit(self.mismatches, allow_dtype_cast=self._allow_dtype_cast)
        self._fitted = {path: fit.fit(own, value, key_of(path)) for path, (own, value) in tuples.items()}
        self._missing += fit.missing
        self.unexpected = sorted([*self.unexpected, *fit.unexpected])
        self.shortens_lists |= bool(fit.unexpected)

    def make_memory(self) -> None:
        """Make memory for what is on the meta device, to read into; only `finish` gives it to the modules.

        Raises:
            CheckpointLoadError: there is none on the device, or a tensor cannot be given any; nothing has got memory
        """
        meta, before = self._meta_tensors(), self._flat
        self._flat = flat = meta.filled(before)
        new = dict(zip(map(id, before.tensors), flat.tensors, strict=True))
        for requests in (self.requests, self._converted):
            requests[:] = [
                Request.into(each.key, new[id(each.destination)], each.offsets) if each.destination.is_meta else each
                for each in requests
            ]
        values = {
            path: flat.placed.get(number, flat.tensors[number])
            for number, (path, tensor) in enumerate(zip(before.tensor_paths, before.tensors, strict=True))
            if tensor.is_meta and self._kinds.object_around(path) is None and not meta.holds(tensor)
        }
        self._values = {**whole_values(values, flat.made), **self._values}

    def left_on_meta(self) -> Iterator[str]:
        """What is on the meta device after the load, a sentence each, to log."""
        return self._meta_tensors().left(self._flat)

    def _gets_memory(self, path: Path, tensor: torch.Tensor) -> bool:
        """Whether a tensor on the meta device gets memory: one of a module, or of the state of a parameter."""
        if self._meta_tensors().has(tensor):
            return True
        around = self._kinds.object_around(path)
        parameter = None if around is None else parameter_of(self._kinds.objects[around], path[len(around) :])
        if parameter is not None:
            self._meta_tensors().place_state(tensor, parameter)
        return parameter is not None

    def _meta_tensors(self) -> MetaTensors:
        """What the modules have on the meta device; looked for only where there is something."""
        if self._meta is None:
            self._meta = MetaTensors(self._modules, self._device)
        return self._meta

    def _copy_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter; of one on the meta device, zeros where it gets memory."""
        if parameter.is_meta:
            return self._meta_tensors().like(parameter, parameter.dtype).zero_()
        return parameter.detach().clone()

    def accept(self, loaded: Mapping[str, Any]) -> None:
        """Collect the new values from what was read.

        Args:
            loaded: the values of `new_tensors` and `objects`, by key

        Raises:
            CheckpointLoadError: a parameter is quantized in another way
        """
        self._loaded = loaded
        if self._descriptions:
            refuse_other_descriptions(self._descriptions, loaded, self._source.where)
        for path, keys in self._replaced.items():
            self._values[path] = loaded[keys[0]] if keys == [key_of(path)] else self._assemble(path, keys, loaded)
        self._values.update(self._fitted)

    def finish(self, proof: Proof | None = None) -> None:
        """Store the new values in the target and load the objects' states.

        Args:
            proof: compares what the objects then give back; None: they are not asked

        Raises:
            CheckpointLoadError: a tensor or an object does not take its value
        """
        if self.on_meta:
            self._meta_tensors().give()
        for request in self._converted:
            copy_into(request.destination, request.part_of(self._loaded[request.key]), request.key)
        for key, description in self._descriptions.items():
            description.accept(self._loaded[key])
        for path, value in self._values.items():
            if self._kinds.object_around(path) is None:
                if path in self._flat.mappings and isinstance(value, Mapping):
                    refill(self._flat.mappings[path], value, key_of(path))
                else:
                    _set(self._state_dict, path, value)
        objects = self._kinds.objects
        for path in sorted(objects, key=key_of):  # one order on all ranks: an object may talk to those of others
            containers, missing = self._source.contents.containers, set(self._missing)
            state = partial(state_of_object, path, self._flat, self._kinds, self._values, missing, containers)
            load_state(objects[path], state, key_of(path), self._source.where, proof)
        if self._weights is not None:
            self._weights.kept(self._flat, [path for path, each in objects.items() if takes_only_its_own_keys(each)])

    def _assemble(self, path: Path, keys: Sequence[str], loaded: Mapping[str, Any]) -> Any:
        """The checkpoint's subtree at a path."""
        contents = self._source.contents
        stored = contents.path_of(keys[0])[: len(path)] if keys else path  # stored dict keys may be strings
        return nested_value(stored, {contents.path_of(key): loaded[key] for key in keys}, contents.containers)


def _set(root: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        root = root.value if isinstance(root, PerRank) else root[part]
    if isinstance(root, PerRank):
        root.value = value
    else:
        root[path[-1]] = value
