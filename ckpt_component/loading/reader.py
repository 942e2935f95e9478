"""Load a checkpoint of any supported format into a target or a new dict."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..core.commit.manifest import check_files, data_folder, read_manifest
from ..core.commit.names import SINGLE_FILES
from ..core.commit.scan import pointed_folder
from ..core.formats.rank_index import read_rank_indexes
from ..core.formats.verification import verify_checkpoint, verify_file
from ..core.memory.gc_control import collector_paused
from ..core.options import Verify
from ..core.progress import Progress, no_progress
from ..core.state.flatten import StateDict, unflatten
from ..core.state.key_map import KeyMap
from ..core.storage.locate import storage_at
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointLoadError, CheckpointNotFoundError, first_keys
from .coalesced import WIDTHS
from .foreign.archives import RefusedObject
from .foreign.folder import open_file, open_folder
from .foreign.torch_file import TorchFileSource
from .mapped_source import MappedSource
from .mismatch import likely_option
from .object_state import load_state
from .own_format import OwnSource
from .source import Request, Source
from .target import Target

logger = logging.getLogger("ckpt_component.readers")

_ToDevice = Callable[[torch.Tensor], torch.Tensor]


class Reader:
    """Reads our own checkpoints, verified by their checksums, and those of stock DCP, `torch.save` and safetensors.

    Args:
        rank: This rank, whose `PerRank` values and files are loaded.
        world_size: Number of ranks.
        verify: When to verify checksums. Sizes and structure are always checked.
        shared: Whether other ranks on this host may read the same bytes; see `Storage.open_files`.
        options: `checkpoint.storage.options`, for checkpoints in buckets.
        storage_of: Returns the storage of a path; None: one is made for each load, with these options.
        progress: Follows what loads read.

    Attributes:
        last_read: What the last `read` adds to its `LoadReport`: `bytes`, `verified` and `spans`.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        verify: Verify = Verify.on_read,
        *,
        shared: bool = True,
        options: Mapping[str, Any] | None = None,
        storage_of: Callable[[str], Storage] | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._verify = verify
        self._shared = shared
        self._storage_of = storage_of or partial(storage_at, options=options)
        self._progress = progress
        self.last_read: dict[str, Any] = {}

    @property
    def verifies(self) -> bool:
        """Whether checksums are verified when a run resumes."""
        return self._verify is not Verify.off

    @collector_paused()  # as decorators: what a load leaves behind is freed before collections start again
    @torch.no_grad()
    def read(
        self,
        path: str,
        state_dict: StateDict | torch.nn.Module | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        allow_dtype_cast: bool = False,
        allow_unexpected: bool = True,
        resuming: bool = False,
        rename: Mapping[str, str] | None = None,
        prefix: str = "",
        ignore: Sequence[str] = (),
        narrow: Callable[[Source], Source] | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> tuple[Any, list[str]]:
        """Read the checkpoint at `path`.

        Args:
            path: The checkpoint's folder or file.
            state_dict: The target, a dict or a module, filled in place; None: load everything into a new dict on the
                CPU.
            map_location: A device, dict or function as for `torch.load`, for tensors that have no target.
            strict: Refuse a checkpoint that lacks keys of the target.
            allow_dtype_cast: Convert values to the dtype of the target tensor.
            allow_unexpected: Ignore keys of the checkpoint that the target lacks; False: refuse them.
            resuming: A run resumes from this checkpoint; it is verified with `verify: on_resume`.
            rename: As for `KeyMap`.
            prefix: As for `KeyMap`.
            ignore: As for `KeyMap`.
            narrow: Returns the part of the checkpoint that the target is compared with, under its new keys; None: all.
            manifest: That of the checkpoint, if it was read already.

        Returns:
            The target or the new dict, and the keys of the target that the checkpoint lacks.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointLoadError: See `Checkpointer.load`.
        """
        self.last_read, marks = {}, [time.perf_counter()]
        verify = self._verify is Verify.on_read or (resuming and self._verify is Verify.on_resume)
        to_device = _to_device(map_location)
        key_map = KeyMap(rename, prefix, ignore) if rename or prefix or ignore else None
        source = self.open(path, mapped=state_dict is not None, verify=verify, manifest=manifest)
        marks.append(time.perf_counter())
        mapped = None
        if key_map is not None:
            source = mapped = MappedSource(source, key_map)
        if narrow is not None:
            source = narrow(source)
        if state_dict is None:
            if mapped is not None:
                mapped.check_ignored([])
            loaded = _load_all(source, to_device, self._progress)
            self._note_spans(marks)
            return loaded, []
        state = state_dict.state_dict() if isinstance(state_dict, torch.nn.Module) else state_dict
        target = Target(state, source, self._rank, self._world_size, allow_dtype_cast=allow_dtype_cast)
        objects = source.read_objects(target.objects)
        missing = target.compare(objects)
        if mapped is not None:
            mapped.check_ignored(target.keys())
            missing = [key for key in missing if not mapped.leaves(key)]
        target.mismatches.refuse(missing, target.unexpected, strict=strict, allow_unexpected=allow_unexpected)
        option = likely_option(missing, target.unexpected) if missing else None
        if option is not None:
            logger.warning("%s may have what is missing under other keys; did you mean %s?", path, option)
        if target.unexpected:
            # A plain load may be partial. A resumed run should load all that it saved, and a list only as a whole.
            level = logging.WARNING if resuming or target.shortens_lists else logging.INFO
            text = "%s has keys that the target does not have: %s; they are not loaded"
            logger.log(level, text, path, first_keys(target.unexpected))
        marks.append(time.perf_counter())
        target.accept({**_load_tensors(source, target.new_tensors, to_device, self._progress), **objects})
        source.read_tensors(target.requests, self._progress)
        target.finish()
        if isinstance(state_dict, torch.nn.Module):
            load_state(state_dict, lambda: state, "The target", source.where)
        self._note_spans(marks)
        return state_dict, missing

    def _note_spans(self, marks: list[float]) -> None:
        marks.append(time.perf_counter())
        ends = [mark - marks[0] for mark in marks]
        names = ("open", "match", "read") if len(marks) == 4 else ("open", "read")
        self.last_read["spans"] = dict(zip(names, itertools.pairwise(ends), strict=True))

    def verify(self, path: str) -> bool:
        """Verify every file of a checkpoint of ours; False: it has no checksums. See `verify_checkpoint`."""
        return verify_checkpoint(self._storage_of(path), path, self._progress)

    def open(
        self, path: str, *, mapped: bool = False, verify: bool = True, manifest: Mapping[str, Any] | None = None
    ) -> Source:
        """Open `path` by its format. It may itself be a link, because the caller chose it; no file in it may.

        Args:
            path: The checkpoint's folder or file.
            mapped: As for `TorchFileSource`.
            verify: Compare checksums, where the checkpoint has them.
            manifest: As for `read`.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointLoadError: See `Checkpointer.load`.
        """
        fs = self._storage_of(path)
        try:
            is_folder = fs.is_folder(path)
            exists = is_folder or fs.exists(path)
        except OSError as error:
            raise read_failure(path, error) from error
        if not is_folder:
            if not exists:
                raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
            self.last_read["bytes"] = fs.size(path) or 0
            return open_file(fs, path, mapped=mapped, verify=verify, shared=self._shared)
        manifest = manifest or read_manifest(fs, path)
        if manifest is not None:
            size = sum(entry["size"] for entry in manifest["files"])
            self.last_read = {"bytes": size, "verified": verify}
            return self._open_own(fs, data_folder(fs, path, manifest), manifest, mapped=mapped, verify=verify)
        try:
            names = fs.names(path)
        except OSError as error:
            raise read_failure(path, error) from error
        source = open_folder(fs, path, names, mapped=mapped, verify=verify, shared=self._shared)
        if source is not None:
            logger.warning("%s has no manifest, so what is loaded from it cannot be verified", path)
            self.last_read["bytes"] = sum(fs.size(os.path.join(path, name)) or 0 for name in names)
            return source
        pointed = pointed_folder(fs, path)
        if pointed is not None:
            logger.info("%s is a folder of checkpoints; loading the newest, %s", path, pointed)
            return self.open(pointed, mapped=mapped, verify=verify)
        raise CheckpointNotFoundError(
            f"{path} holds no checkpoint ({', '.join(names[:5]) or 'it is empty'}); name the folder of one, with "
            "manifest.json, .metadata or a file of weights, or the file."
        )

    def _open_own(self, fs: Storage, path: str, manifest: Mapping[str, Any], *, mapped: bool, verify: bool) -> Source:
        check_files(fs, path, manifest)
        form, world_size, ranks = manifest.get("format"), manifest["world_size"], None
        if form == "files":
            names = [entry["name"] for entry in manifest["files"] if entry["name"].endswith(SINGLE_FILES)]
            raise CheckpointLoadError(
                f"{path} has the files of another program, which loads them itself; here, load one of them: "
                f"{', '.join(names) or 'none of them is a checkpoint'}."
            )
        if form not in ("dcp", "safetensors", "torch_save"):
            raise CheckpointLoadError(f"{path} has the format {form!r:.200}, which this release cannot read.")
        rank = self._rank if world_size > 1 else 0
        if form != "dcp":  # one file per rank
            if world_size not in (1, self._world_size):
                raise CheckpointLoadError(
                    f"{path} was saved by {world_size} ranks with checkpoint/writer={form}, which writes one file per "
                    f"rank, and there are {self._world_size} now; only checkpoints of checkpoint/writer=dcp load "
                    "on another number of ranks."
                )
            ranks = [rank]
        indexes = read_rank_indexes(fs, path, manifest, ranks, WIDTHS)
        if form != "torch_save":
            return OwnSource(fs, path, indexes, verify=verify, shared=self._shared)
        name = f"checkpoint_{rank}.pt"
        if name not in {entry["name"] for entry in manifest["files"]}:
            raise CheckpointCorruptError(f"{path} has no file of rank {rank}, {name}.")
        if verify:
            verify_file(fs, path, name, indexes[0], self._progress)
        return TorchFileSource(fs, os.path.join(path, name), mapped=mapped)


def shares_host(world_size: int) -> bool:
    """Whether other ranks may be on this host: torchrun sets how many there are, other launchers may not."""
    return world_size > 1 and os.environ.get("LOCAL_WORLD_SIZE") != "1"


def _load_all(source: Source, to_device: _ToDevice, progress: Progress) -> StateDict:
    index = source.index
    tensors = _load_tensors(source, index.tensors, to_device, progress)
    values = {**tensors, **source.read_objects([*index.objects])}
    refused = {key: value.kind for key, value in values.items() if isinstance(value, RefusedObject)}
    if refused:
        logger.warning(
            "%s: %d value(s) are objects that safe loading does not create, and are left out: %s; if you trust the "
            "file, load it with torch.load(weights_only=False)",
            source.where,
            len(refused),
            first_keys([f"{key} ({kind})" for key, kind in refused.items()]),
        )
    try:
        return unflatten(
            {index.path_of(key): value for key, value in values.items() if key not in refused}, index.containers
        )
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointCorruptError(f"The keys of {source.where} make up no state dict: {error}.") from error


def _load_tensors(
    source: Source, keys: Iterable[str], to_device: _ToDevice, progress: Progress
) -> dict[str, torch.Tensor]:
    """Load these keys into new tensors. Tensors that are stored once stay tied."""
    loaded: dict[str, torch.Tensor] = {}
    stored: dict[Any, torch.Tensor] = {}
    requests = []
    for key in keys:
        entry = source.index.tensors[key]
        tied = source.tied(key)
        if tied is not None:
            loaded[key] = tied
            continue
        if entry.same_as not in stored:
            stored[entry.same_as] = torch.empty(entry.shape, dtype=entry.dtype)
            requests.append(Request.into(key, stored[entry.same_as]))
        loaded[key] = stored[entry.same_as]
    source.read_tensors(requests, progress)
    moved = {id(tensor): to_device(tensor) for tensor in {id(tensor): tensor for tensor in loaded.values()}.values()}
    return {key: moved[id(tensor)] for key, tensor in loaded.items()}


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
