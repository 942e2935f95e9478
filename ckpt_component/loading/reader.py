"""Load a checkpoint of any supported format into a target or a new dict."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from ..core.commit.scan import pointed_folder
from ..core.commit.visibility import wait_visible
from ..core.formats.dcp_metadata import Megatron, StockDcp
from ..core.formats.index import Index
from ..core.formats.opening import open_index
from ..core.formats.own import OwnIndex, OwnTorchSave
from ..core.formats.torch_file import TorchFile
from ..core.formats.verification import verify_checkpoint
from ..core.memory.gc_control import collector_paused
from ..core.options import Prove, Verify
from ..core.progress import Progress, no_progress
from ..core.state.flatten import StateDict, unflatten
from ..core.state.key_map import KeyMap
from ..core.state.objects import refuse_fake_tensors
from ..core.state.wrapped_modules import canonical_state_of
from ..core.storage.locate import storage_at
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointLoadError, CheckpointNotFoundError, first_keys
from .collective import CollectiveLoad, CollectiveLoads, OpenFiles, Phase
from .foreign.archives import RefusedObject
from .foreign.dcp import StockDcpSource
from .foreign.megatron import MegatronSource
from .foreign.torch_file import TorchFileSource
from .load_options import LoadOptions
from .mapped_source import MappedSource
from .mismatch import how_to_find
from .object_state import load_state
from .own_dicts import plain_now
from .proof import Proof
from .ranges import RangeSource
from .source import Access, Source
from .target import Target
from .torch_save import TorchSaveSource

logger = logging.getLogger("ckpt_component.readers")

_ToDevice = Callable[[torch.Tensor], torch.Tensor]


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
        collective: makes the loads that all ranks make, and is closed with this; None: this rank loads by itself

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
        collective: CollectiveLoads | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._verify = verify
        self._shared = shared
        self._storage_of = storage_of
        self._progress = progress
        self._prove = prove
        self._may_differ = may_differ
        self._collective = collective
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
        wanted, clock = LoadOptions(**options), time.perf_counter
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
                to_device, names = _to_device(wanted.map_location), (wanted.rename, wanted.prefix, wanted.ignore)
                key_map = KeyMap(*names) if any(names) else None
                verify = self._verify is Verify.on_read or (wanted.resuming and self._verify is Verify.on_resume)
                if wanted.visible is not None:
                    wait_visible(partial(self._storage_of(path).exists, path), path, wanted.visible)
                is_target = state_dict is not None
                source = self.open(path, mapped=is_target, verify=verify, manifest=wanted.manifest, load=load)
                if source.verifies_first:
                    marks.append(("verify", clock()))
                    share = (self._rank, self._world_size) if phase is not nullcontext else (0, 1)
                    until_read.enter_context(source.verified(*share))
            marks.append(("read" if state_dict is None else "match", clock()))
            target: Target | None = None
            missing: list[str] = []
            with phase("read"):
                mapped = None
                if key_map is not None:
                    source = mapped = MappedSource(source, key_map)
                if wanted.narrow is not None:
                    source = wanted.narrow(source)
                if state_dict is None:
                    if mapped is not None:
                        mapped.check_ignored([])
                    state_dict = _load_all(source, to_device, self._progress)
                else:
                    if isinstance(state_dict, torch.nn.Module):
                        state, own_state = canonical_state_of(state_dict)
                    else:
                        state = state_dict
                    target = Target(
                        state,
                        source,
                        self._rank,
                        self._world_size,
                        allow_dtype_cast=wanted.allow_dtype_cast,
                        mapped=mapped,
                    )
                    source = target.source
                    objects = source.read_objects(target.objects)
                    missing = _match(path, target, objects, mapped, wanted)
                    marks.append(("read", clock()))
                    tensors = {}
                    if target.new_tensors:
                        tensors = _moved(source.new_tensors(target.new_tensors, self._progress), to_device)
                    target.accept({**tensors, **objects})
                    source.read_tensors(target.requests, self._progress)
            with phase("take"):  # only now, so that no object waits for one on a rank that could not read
                if target is not None:
                    proves = self._prove is Prove.on_read or (wanted.resuming and self._prove is Prove.on_resume)
                    proof = Proof(source.where, self._may_differ) if proves else None
                    target.finish(proof)
                    if isinstance(state_dict, torch.nn.Module):
                        load_state(state_dict, partial(own_state, state), "", source.where, proof)
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


def open_source(index: Index, access: Access, rank: int = 0, world_size: int = 1) -> Source:
    """What reads what a rank loads of a checkpoint.

    Args:
        index: the checkpoint
        access: how it is read
        rank: the rank
        world_size: number of ranks

    Raises:
        CheckpointCorruptError, CheckpointLoadError: see `Checkpointer.load`
    """
    if isinstance(index, OwnIndex):
        if index.per_rank and index.world_size not in (1, world_size):
            raise CheckpointLoadError(
                f"{index.where} was saved by {index.world_size} ranks with checkpoint/writer={index.format}, which "
                f"writes one file per rank, and there are {world_size} now; only checkpoints of checkpoint/writer=dcp "
                "load on another number of ranks."
            )
        rank = rank if index.world_size > 1 else 0
        if isinstance(index, OwnTorchSave):
            return TorchSaveSource(index, rank, access)
        return RangeSource(index, index.of_rank(rank), access)
    if isinstance(index, Megatron):
        return MegatronSource(index, access)
    if isinstance(index, StockDcp):
        return StockDcpSource(index, access)
    if isinstance(index, TorchFile):
        return TorchFileSource(index.storage, index.where, access)
    return RangeSource(index, index.contents, access)


def shares_host(world_size: int) -> bool:
    """Whether other ranks may be on this host: torchrun sets how many there are, other launchers may not."""
    return world_size > 1 and os.environ.get("LOCAL_WORLD_SIZE") != "1"


def _spans(marks: Sequence[tuple[str, float]]) -> dict[str, tuple[float, float]]:
    """When the phases of a load began and ended, in seconds since its start, from when each of them began."""
    spans, (_, started) = {}, marks[0]
    for (name, begin), (_, end) in itertools.pairwise(marks):
        spans[name] = begin - started, end - started
    return spans


def _match(
    path: str, target: Target, objects: Mapping[str, Any], mapped: MappedSource | None, wanted: LoadOptions
) -> list[str]:
    """Compare a target with a checkpoint, and refuse what does not fit; returns the keys that the checkpoint lacks."""
    missing = target.compare(objects)
    if mapped is not None:
        mapped.check_ignored(target.keys())
        missing = [key for key in missing if not mapped.is_ignored(key)]
    target.mismatches.refuse(missing, target.unexpected, strict=wanted.strict, allow_unexpected=wanted.allow_unexpected)
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


def _load_all(source: Source, to_device: _ToDevice, progress: Progress) -> StateDict:
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


def _moved(tensors: Mapping[str, torch.Tensor], to_device: _ToDevice) -> dict[str, torch.Tensor]:
    """Move new tensors to their device; tied ones stay tied."""
    moved = {id(tensor): to_device(tensor) for tensor in {id(tensor): tensor for tensor in tensors.values()}.values()}
    return {key: moved[id(tensor)] for key, tensor in tensors.items()}


def _to_device(map_location: Any) -> _ToDevice:
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
