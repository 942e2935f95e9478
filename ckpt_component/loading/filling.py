"""Fill a target with what a source reads, or a new dict with all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..core.progress import Progress
from ..errors import CheckpointCorruptError, CheckpointLoadError, first_keys
from ..formats.foreign import RefusedObject
from ..formats.source import MappedSource, Source
from ..state.flatten import StateDict, unflatten
from ..state.frozen_weights import FrozenWeights
from ..state.paths import FROZEN
from ..state.wrapped_modules import canonical_state_of
from .frozen_base import FrozenBase
from .load_options import LoadOptions
from .mismatch import Misfit, how_to_find
from .object_state import load_state
from .own_dicts import plain_now
from .proof import Proof
from .target import Target

logger = logging.getLogger("ckpt_component.readers")

#: Moves a new tensor to where it is to be.
ToDevice = Callable[[torch.Tensor], torch.Tensor]


class Filling:
    """A dict or a module that is filled in place: compared first, then read into, and at last given its objects.

    Args:
        goal: the dict or the module
        source: what is read
        mapped: the source, if keys are mapped
        wanted: how to load
        rank: this rank
        world_size: number of ranks
        device: as for `MetaTensors`
        weights: what leaves frozen parameters out of the saves of a run that resumes; None: nothing does

    Attributes:
        frozen: see `Target`
    """

    def __init__(
        self,
        goal: StateDict | torch.nn.Module,
        source: Source,
        mapped: MappedSource | None,
        wanted: LoadOptions,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        weights: FrozenWeights | None = None,
    ) -> None:
        self._goal = goal
        self._own_state: Any = None
        modules = wanted.modules
        if isinstance(goal, torch.nn.Module):
            modules = [goal]
            goal, self._own_state = canonical_state_of(goal)
        self._state = goal
        self._mapped = mapped
        self._wanted = wanted
        self._target = Target(
            goal,
            source,
            rank,
            world_size,
            allow_dtype_cast=wanted.allow_dtype_cast,
            mapped=mapped,
            modules=modules,
            device=device,
            weights=weights,
        )
        self.frozen = self._target.frozen
        self._source = self._target.source
        self._objects: Mapping[str, Any] = {}

    def match(self, path: str) -> list[str]:
        """Compare the target with the checkpoint, and refuse what does not fit.

        Args:
            path: the checkpoint, as the caller has named it

        Returns:
            The keys that the checkpoint lacks.
        """
        target, mapped, wanted = self._target, self._mapped, self._wanted
        if self.frozen is not None and (misfit := self.frozen.misfit()) is not None:
            target.mismatches.add(misfit)
        self._objects = self._source.read_objects(target.objects)
        missing = target.compare(self._objects)
        if mapped is not None:
            mapped.check_ignored(target.keys())
            for key in missing if target.on_meta else ():
                if key in target.on_meta and mapped.is_ignored(key):
                    fact = f"'{key}' is on the meta device, and ignore leaves it out"
                    target.mismatches.add(Misfit(key, fact, "give it memory and values before the load"))
            missing = [key for key in missing if not mapped.is_ignored(key)]
        target.mismatches.refuse(
            missing,
            target.unexpected,
            strict=wanted.strict,
            allow_unexpected=wanted.allow_unexpected,
            needed=target.on_meta,
        )
        advice = how_to_find(missing, target.unexpected) if missing else None
        if advice is not None:
            logger.warning("%s may have what is missing under other keys. %s", path, advice)
        for note in target.notes:
            logger.warning("%s", note)
        if target.unexpected:
            # A plain load may be partial. A resumed run should load all that it saved, and a list only as a whole.
            level = logging.WARNING if wanted.resuming or target.shortens_lists else logging.INFO
            text = "%s has keys that the target does not have: %s; they are not loaded"
            logger.log(level, text, path, first_keys(target.unexpected))
        return missing

    @property
    def filled(self) -> list[str]:
        """The keys of the tensors that `read` fills."""
        return [request.key for request in self._target.requests]

    def read(self, to_device: ToDevice, progress: Progress) -> None:
        """Read the tensors, those that the target lacks into new ones."""
        target, tensors = self._target, dict[str, torch.Tensor]()
        if target.on_meta:
            target.make_memory()
        if target.new_tensors:
            tensors = _moved(self._source.new_tensors(target.new_tensors, progress), to_device)
        target.accept({**tensors, **self._objects})
        self._source.read_tensors(target.requests, progress)

    def take(self, proof: Proof | None) -> None:
        """Give the objects of the target, and the module, what was read; `proof` compares what they give back."""
        self._target.finish(proof)
        if isinstance(self._goal, torch.nn.Module):
            load_state(self._goal, partial(self._own_state, self._state), "", self._source.where, proof)
        for text in self._target.left_on_meta() if self._target.on_meta else ():
            logger.warning("%s", text)


def load_all(source: Source, to_device: ToDevice, progress: Progress) -> StateDict:
    """Load everything into a new dict.

    Raises:
        CheckpointCorruptError: its keys make up no dict
    """
    contents = source.contents
    if any(FROZEN in entry.path for entry in contents.objects.values()):
        frozen = FrozenBase(source, None)
        text = "%s does not have %d frozen tensors, which checkpoint.save.frozen=skip left out: %s"
        logger.warning(text, source.where, len(frozen.keys), first_keys(sorted(frozen.keys)))
        source = frozen.without_records(source)
        contents = source.contents
    tensors = _moved(source.new_tensors(contents.tensors, progress), to_device)
    values = {**tensors, **source.read_objects([*contents.objects])}
    refused = {key: value.kind for key, value in values.items() if isinstance(value, RefusedObject)}
    if refused:
        logger.warning(
            "%s: %d value(s) are objects that safe loading does not create, and are left out: %s; if you trust the "
            "file, load it with torch.load(weights_only=False)",
            source.where,
            len(refused),
            first_keys([f"{key} ({kind})" for key, kind in refused.items()]),
        )
    if plain := plain_now(contents, [()]):
        logger.warning("%s: %s", source.where, plain)
    try:
        kept = {contents.path_of(key): value for key, value in values.items() if key not in refused}
        return unflatten(kept, contents.containers, classes=True)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointCorruptError(f"The keys of {source.where} make up no state dict: {error}.") from error


def _moved(tensors: Mapping[str, torch.Tensor], to_device: ToDevice) -> dict[str, torch.Tensor]:
    """Move new tensors to their device; tied ones stay tied."""
    moved = {id(tensor): to_device(tensor) for tensor in {id(tensor): tensor for tensor in tensors.values()}.values()}
    return {key: moved[id(tensor)] for key, tensor in tensors.items()}


def to_device_of(map_location: Any) -> ToDevice:
    """The function that moves new tensors, from a `map_location` as `torch.load` takes it."""
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    if map_location is None:
        return lambda tensor: tensor
    if isinstance(map_location, (str, torch.device)):
        device = torch.device(map_location)
        return lambda tensor: tensor.to(device)
    if callable(map_location):

        def by_function(tensor: torch.Tensor) -> torch.Tensor:
            storage = map_location(tensor.untyped_storage(), "cpu")
            if storage is None:
                return tensor
            empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
            return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

        return by_function
    raise CheckpointLoadError(
        f"default_map_location={map_location!r} is a {type(map_location).__name__}; give a device, a dict "
        "or a function."
    )
