"""Load a checkpoint of any supported format into a target or a new dict."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..core.commit.manifest import manifest_of_attempt
from ..core.commit.protocol import wait_visible
from ..core.commit.scan import pointed_folder
from ..core.gc_control import collector_paused
from ..core.options import Prove, Verify
from ..core.progress import Progress, no_progress
from ..core.storage.locate import storage_at
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointLoadError, CheckpointNotFoundError, first_keys
from ..formats.foreign import RefusedObject
from ..formats.open_source import open_source
from ..formats.opening import open_index
from ..formats.source import Access, MappedSource, Source
from ..formats.verification import verify_checkpoint
from ..state.flatten import StateDict, unflatten
from ..state.frozen_weights import FrozenWeights
from ..state.key_map import KeyMap
from ..state.objects import refuse_fake_tensors
from ..state.paths import FROZEN
from ..state.wrapped_modules import canonical_state_of
from .collective import CollectiveLoad, CollectiveLoads, OpenFiles, Phase
from .frozen_base import FrozenBase, together
from .kinds import LoadOptions
from .mismatch import Misfit, how_to_find
from .object_state import load_state, plain_now
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


class Reader:
    """Reads our own checkpoints, verified by their checksums, and those of stock DCP, `torch.save` and safetensors.

    Args:
        rank: this rank, whose `PerRank` values and files are loaded
        world_size: number of ranks
        verify: when to verify checksums; sizes and structure are always checked
        shared: whether other ranks on this host may read the same bytes; see `Storage.open_files`
        storage_of: returns the storage of a path
        progress: follows what loads read
        prove: when to compare what objects give back with what they were given
        may_differ: keys whose values may differ then; `*` stands for any text
        device: where modules on the meta device get memory; None: the default device, and that of a DTensor's mesh
        collective: makes the loads that all ranks make, and is closed with this; None: this rank loads by itself
        frozen: what leaves frozen parameters out of the run's saves; None: all are saved

    Attributes:
        last_read: what the last `read` adds to its `LoadReport`: `bytes`, `verified`, `proven`, `differing` and `spans`
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        verify: Verify = Verify.on_read,
        *,
        shared: bool = True,
        storage_of: Callable[[str], Storage] = storage_at,
        progress: Progress = no_progress,
        prove: Prove = Prove.on_resume,
        may_differ: Sequence[str] = (),
        device: torch.device | None = None,
        collective: CollectiveLoads | None = None,
        frozen: FrozenWeights | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._verify = verify
        self._shared = shared
        self._storage_of = storage_of
        self._progress = progress
        self._prove = prove
        self._may_differ = may_differ
        self._device = device
        self._collective = collective
        self._frozen = frozen
        self.last_read: dict[str, Any] = {}

    @property
    def verifies(self) -> bool:
        """Whether checksums are verified when a run resumes."""
        return self._verify is not Verify.off

    @collector_paused()  # as decorators: what a load leaves behind is freed before collections start again
    @torch.no_grad()
    def read(
        self, path: str, state_dict: StateDict | torch.nn.Module | None = None, **options: Any
    ) -> tuple[Any, list[str]]:
        """Read the checkpoint at `path`.

        Args:
            path: the checkpoint's folder or file
            state_dict: the target, a dict or a module, filled in place; None: load everything into a new dict on the
                CPU
            **options: see `LoadOptions`

        Returns:
            The target or the new dict, and the keys of the target that the checkpoint lacks.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointLoadError: see `Checkpointer.load`
            CheckpointError: a mode of torch makes tensors without memory
        """
        wanted, clock = LoadOptions(**options), perf_counter
        marks = [("open", clock())]
        self.last_read = {}
        load: CollectiveLoad | None = wanted.part_of
        phase: Phase = nullcontext
        if load is None and self._collective is not None and not wanted.alone:
            load = self._collective.load(path, wanted.tag)
            phase = load.phase
        with ExitStack() as until_read:
            with phase("open"):
                refuse_fake_tensors()
                to_device, names = to_device_of(wanted.map_location), (wanted.rename, wanted.prefix, wanted.ignore)
                key_map = KeyMap(*names) if any(names) else None
                verify = self._verify is Verify.on_read or (wanted.resuming and self._verify is Verify.on_resume)
                if wanted.visible is not None:
                    _wait_visible(self._storage_of(path), path, wanted.visible)
                manifest = wanted.manifest
                if manifest is None and wanted.attempt:
                    manifest = manifest_of_attempt(self._storage_of(path), path, wanted.attempt)
                is_target = state_dict is not None
                source = self.open(path, mapped=is_target, verify=verify, manifest=manifest, load=load)
                objects = source.contents.objects.values() if phase is not nullcontext and source.shared else ()
                meets = any(FROZEN in entry.path for entry in objects)
                if source.verifies_first:
                    marks.append(("verify", clock()))
                    share = (self._rank, self._world_size) if phase is not nullcontext else (0, 1)
                    until_read.enter_context(source.verified(*share))
            marks.append(("read" if state_dict is None else "match", clock()))
            filling: Filling | None = None
            missing: list[str] = []
            with ExitStack() as within:
                within.enter_context(phase("compare" if meets else "read"))
                mapped = None
                if key_map is not None:
                    source = mapped = MappedSource(source, key_map)
                if wanted.narrow is not None:
                    source = wanted.narrow(source)
                if state_dict is None:
                    if mapped is not None:
                        mapped.check_ignored([])
                    state_dict = load_all(source, to_device, self._progress)
                else:
                    weights = self._frozen if wanted.resuming else None
                    where = (self._rank, self._world_size, self._device)
                    filling = Filling(state_dict, source, mapped, wanted, *where, weights)
                if meets and load is not None:
                    within.close()
                    frozen = None if filling is None else filling.frozen
                    told = load.decide("frozen", None if frozen is None else frozen.message(), together)
                    within.enter_context(phase("read"))
                    if frozen is not None:
                        frozen.settle(*told)
                if filling is not None:
                    missing = filling.match(path)
                    marks.append(("read", clock()))
                    if self._frozen is not None:
                        self._frozen.filled(filling.filled)
                    filling.read(to_device, self._progress)
            with phase("take"):  # only now, so that no object waits for one on a rank that could not read
                if filling is not None:
                    proves = self._prove is Prove.on_read or (wanted.resuming and self._prove is Prove.on_resume)
                    proof = Proof(source.where, self._may_differ) if proves else None
                    filling.take(proof)
                    if proof is not None:
                        proof.conclude()
                        self.last_read.update(proven=tuple(proof.proven), differing=tuple(proof.differing))
        self.last_read["spans"] = _spans([*marks, ("", clock())])
        return state_dict, missing

    def close(self) -> None:
        """Close what loads have left open for those that follow. Safe to call twice."""
        if self._collective is not None:
            self._collective.close()

    def verify(self, path: str) -> bool:
        """Verify every file of a checkpoint of ours; False: it has no checksums. See `verify_checkpoint`."""
        return verify_checkpoint(self._storage_of(path), path, self._progress)

    def open(
        self,
        path: str,
        *,
        mapped: bool = False,
        verify: bool = True,
        manifest: Mapping[str, Any] | None = None,
        load: CollectiveLoad | None = None,
    ) -> Source:
        """Open what this rank loads of a checkpoint, or of the newest in a folder with a pointer file.

        Args:
            path: the folder or file; it may be a link, because the caller chose it, and no file in it may
            mapped: as for `Access`
            verify: as for `Access`
            manifest: that of the checkpoint, if it was read already
            load: the load that all ranks make; None: this rank loads by itself

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointLoadError: see `Checkpointer.load`
        """
        storage = self._storage_of(path)
        try:
            index = open_index(storage, path, manifest)
        except CheckpointNotFoundError:
            pointed = pointed_folder(storage, path)
            if pointed is None:
                raise
            logger.info("%s is a folder of checkpoints; loading the newest, %s", path, pointed)
            return self.open(pointed, mapped=mapped, verify=verify, load=load)
        open_files: OpenFiles = partial(storage.open_files, shared=self._shared)
        if load is not None:
            open_files = load.opens(open_files, index, verify)
        source = open_source(index, Access(open_files, verify, mapped), self._rank, self._world_size)
        self.last_read.update(bytes=index.nbytes, source="memory" if storage.verifies_first else "storage")
        if index.manifest is not None:
            self.last_read["verified"] = verify
        elif storage.is_folder(path):
            if index.where != index.path:
                logger.info("loading %s", index.where)
            logger.warning("%s has no manifest, so what is loaded from it cannot be verified", path)
        return source


def shares_host(world_size: int) -> bool:
    """Whether other ranks may be on this host: torchrun sets how many there are, other launchers may not."""
    return world_size > 1 and os.environ.get("LOCAL_WORLD_SIZE") != "1"


def _spans(marks: Sequence[tuple[str, float]]) -> dict[str, tuple[float, float]]:
    """When the phases of a load began and ended, in seconds since its start, from when each of them began."""
    spans, (_, started) = {}, marks[0]
    for (name, begin), (_, end) in itertools.pairwise(marks):
        spans[name] = begin - started, end - started
    return spans


def _wait_visible(storage: Storage, path: str, seconds: float) -> None:
    """As `wait_visible`, for a checkpoint; raises CheckpointUnreadableError if a host that may have it has ended."""
    try:
        wait_visible(partial(storage.exists, path), path, seconds, storage)
    except CheckpointError:  # one of a wait is an OSError, too
        raise
    except OSError as error:
        raise read_failure(path, error) from error
