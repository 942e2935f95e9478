"""Load a checkpoint of any supported format into a target or a new dict."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import (
    CheckpointCorruptError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    UnexpectedKeysError,
    first_keys,
)
from ..memory.gc_control import collector_paused
from ..options import Verify
from ..state.flatten import StateDict, unflatten
from ..storage.file_system import file_system
from ..storage.manifest import check_files, data_folder, read_manifest
from ..storage.names import SINGLE_FILES
from ..storage.safe_open import read_failure
from .foreign.safetensors import SafetensorsSource
from .foreign.torch_file import TorchFileSource
from .own_format import OwnSource, verify_file
from .rank_index import read_rank_indexes
from .source import Request, Source
from .target import Target
from .verification import verify_checkpoint

logger = logging.getLogger(__name__)

_ToDevice = Callable[[torch.Tensor], torch.Tensor]


class Reader:
    """Reads our own checkpoints, verified by their checksums, and those of stock DCP, `torch.save` and safetensors.

    Args:
        rank: This rank, whose `PerRank` values and files are loaded.
        world_size: Number of ranks.
        verify: When to verify checksums. Sizes and structure are always checked.
        shared: Whether other ranks on this host may read the same bytes; see `FileSet`.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, verify: Verify = Verify.on_read, *, shared: bool = True
    ) -> None:
        self._fs = file_system(durable=True)
        self._rank = rank
        self._world_size = world_size
        self._verify = verify
        self._shared = shared

    @property
    def verifies(self) -> bool:
        """Whether checksums are verified when a run resumes."""
        return self._verify is not Verify.off

    @collector_paused()  # as decorators: what a load leaves behind is freed before collections start again
    @torch.no_grad()
    def read(
        self,
        path: str,
        state_dict: StateDict | None = None,
        *,
        map_location: Any = None,
        allow_dtype_cast: bool = False,
        allow_unexpected: bool = True,
        resuming: bool = False,
    ) -> tuple[StateDict, list[str]]:
        """Read the checkpoint at `path`.

        Args:
            path: The checkpoint's folder or file.
            state_dict: The target, filled in place; None: load everything into a new dict on the CPU.
            map_location: A device, dict or function as for `torch.load`, for tensors that have no target.
            allow_dtype_cast: Convert values to the dtype of the target tensor.
            allow_unexpected: Ignore keys of the checkpoint that the target lacks; False: refuse them.
            resuming: A run resumes from this checkpoint; it is verified with `verify: on_resume`.

        Returns:
            The target or the new dict, and the keys of the target that the checkpoint lacks.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointLoadError: See `Checkpointer.load`.
        """
        verify = self._verify is Verify.on_read or (resuming and self._verify is Verify.on_resume)
        to_device = _to_device(map_location)
        source = self._open(path, mapped=state_dict is not None, verify=verify)
        if state_dict is None:
            return _load_all(source, to_device), []
        target = Target(state_dict, source, self._rank, self._world_size, allow_dtype_cast=allow_dtype_cast)
        if target.unexpected:
            text = f"{path} has keys that the target does not have: {first_keys(target.unexpected)}"
            if not allow_unexpected:
                raise UnexpectedKeysError(f"{text}; pass allow_unexpected=True to leave them.", target.unexpected)
            # A plain load may be partial. A resumed run should load all that it saved, and a list only as a whole.
            warns = resuming or target.shortens_lists
            logger.log(logging.WARNING if warns else logging.INFO, "%s; they are not loaded", text)
        target.accept(_load_new(source, target.new_tensors, target.objects, to_device))
        source.read_tensors(target.requests)
        return state_dict, target.finish()

    def verify(self, path: str) -> bool:
        """Verify every file of a checkpoint of ours; False: it has no checksums. See `verify_checkpoint`."""
        return verify_checkpoint(self._fs, path)

    def _open(self, path: str, *, mapped: bool, verify: bool) -> Source:
        """Open `path` by its format. It may itself be a link, because the caller chose it; no file in it may."""
        if not os.path.isdir(path):
            if not os.path.lexists(path):
                raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
            if path.endswith(".safetensors"):
                return SafetensorsSource(path, shared=self._shared)
            return TorchFileSource(path, mapped=mapped, verify=verify)
        manifest = read_manifest(self._fs, path)
        if manifest is not None:
            return self._open_own(data_folder(path, manifest), manifest, mapped=mapped, verify=verify)
        try:
            names = self._fs.names(path)
        except OSError as error:
            raise read_failure(path, error) from error
        logger.warning("%s has no manifest, so what is loaded from it cannot be verified", path)
        if ".metadata" in names:
            from .foreign.dcp import StockDcpSource  # few loads need DCP, which takes a second to import

            return StockDcpSource(self._fs, path, shared=self._shared)
        files = [name for name in names if name.endswith(SINGLE_FILES)]
        if len(files) == 1:
            return self._open(os.path.join(path, files[0]), mapped=mapped, verify=verify)
        raise CheckpointNotFoundError(
            f"{path} holds no checkpoint ({', '.join(names[:5]) or 'nothing'}); name the folder of one, with "
            "manifest.json or .metadata, or a file."
        )

    def _open_own(self, path: str, manifest: Mapping[str, Any], *, mapped: bool, verify: bool) -> Source:
        check_files(self._fs, path, manifest)
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
        indexes = read_rank_indexes(self._fs, path, manifest, ranks)
        if form != "torch_save":
            return OwnSource(path, indexes, verify=verify, shared=self._shared)
        name = f"checkpoint_{rank}.pt"
        if name not in {entry["name"] for entry in manifest["files"]}:
            raise CheckpointCorruptError(f"{path} has no file of rank {rank}, {name}.")
        if verify:
            verify_file(path, name, indexes[0])
        return TorchFileSource(os.path.join(path, name), mapped=mapped)


def _load_all(source: Source, to_device: _ToDevice) -> StateDict:
    index = source.index
    values = _load_new(source, index.tensors, index.objects, to_device)
    try:
        return unflatten({index.path_of(key): value for key, value in values.items()}, index.containers)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointCorruptError(f"The keys of {source.where} make up no state dict: {error}.") from error


def _load_new(source: Source, tensors: Iterable[str], objects: Iterable[str], to_device: _ToDevice) -> dict[str, Any]:
    """Load these keys into new tensors and objects. Tensors that are stored once stay tied."""
    loaded: dict[str, torch.Tensor] = {}
    stored: dict[Any, torch.Tensor] = {}
    requests = []
    for key in tensors:
        entry = source.index.tensors[key]
        tied = source.tied(key)
        if tied is not None:
            loaded[key] = tied
            continue
        if entry.same_as not in stored:
            stored[entry.same_as] = torch.empty(entry.shape, dtype=entry.dtype)
            requests.append(Request.into(key, stored[entry.same_as]))
        loaded[key] = stored[entry.same_as]
    source.read_tensors(requests)
    moved = {id(tensor): to_device(tensor) for tensor in {id(tensor): tensor for tensor in loaded.values()}.values()}
    return {**{key: moved[id(tensor)] for key, tensor in loaded.items()}, **source.read_objects(list(objects))}


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
