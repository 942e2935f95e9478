"""Load a checkpoint of any kind, into a target or into a new dict."""

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
from ..state.flatten import Path, StateDict, unflatten
from ..storage.file_system import file_system
from ..storage.manifest import check_files, data_folder, read_manifest
from ..storage.names import SINGLE_FILES
from ..storage.safe_open import read_failure
from .foreign.safetensors import SafetensorsSource
from .foreign.torch_file import TorchFileSource
from .own_format import NativeSource, verify_file
from .source import Request, Source
from .tables import read_tables
from .target import Target

logger = logging.getLogger(__name__)


class Reader:
    """Reads checkpoints: ours, verified by their checksums; and those of stock DCP, `torch.save` and safetensors.

    Args:
        rank: who reads; what is this rank's own is looked for under it.
        world_size: how many ranks there are.
        verify: when the checksums of what is read are compared. Sizes and structure always are.
        shared: whether other ranks on this computer may read the same bytes; see `OpenFiles`.
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
        """Whether checksums are compared when a run resumes."""
        return self._verify is not Verify.off

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
            path: its folder, or the file.
            state_dict: the target, filled in place; None: everything, as a new dict on the CPU.
            map_location: a device or a function as `torch.load` takes it, for tensors that have no target.
            allow_dtype_cast: let a target tensor take values of another dtype.
            allow_unexpected: leave keys of the checkpoint that the target does not have; False: refuse them.
            resuming: a run begins with what is read, which `verify: on_resume` is for.

        Returns:
            The target or the new dict, and the keys of the target that the checkpoint does not have.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointLoadError: see `Checkpointer.load`.
        """
        with collector_paused(), torch.no_grad():
            # What reading took is freed before the collector runs again: it would look at all of it.
            return self._read(path, state_dict, _placer(map_location), allow_dtype_cast, allow_unexpected, resuming)

    def _read(
        self,
        path: str,
        state_dict: StateDict | None,
        place: Callable[[torch.Tensor], torch.Tensor],
        allow_dtype_cast: bool,
        allow_unexpected: bool,
        resuming: bool,
    ) -> tuple[StateDict, list[str]]:
        verify = self._verify is Verify.on_read or (resuming and self._verify is Verify.on_resume)
        source = self._open(path, mapped=state_dict is not None, verify=verify)
        if state_dict is None:
            values = read_values(source, source.index.tensors, source.index.objects, place)
            return _nested(source, values), []
        target = Target(state_dict, source, self._rank, self._world_size, allow_dtype_cast=allow_dtype_cast)
        loud = resuming or target.shortens_lists
        self._tell_unexpected(path, target.unexpected, allowed=allow_unexpected, loud=loud)
        fresh = read_values(source, target.new_tensors, target.objects, place)
        target.check(fresh)
        source.read_tensors(target.requests)
        return state_dict, target.finish(fresh)

    @staticmethod
    def _tell_unexpected(path: str, keys: list[str], *, allowed: bool, loud: bool) -> None:
        if not keys:
            return
        text = f"{path} has keys that the target does not have: {first_keys(keys)}"
        if not allowed:
            raise UnexpectedKeysError(f"{text}; pass allow_unexpected=True to leave them.", keys)
        # To load a part is what a plain load is for. A run that begins again should find all that it saved, and a list
        # is one thing.
        logger.log(logging.WARNING if loud else logging.INFO, "%s; they are not loaded", text)

    def _open(self, path: str, *, mapped: bool, verify: bool) -> Source:
        """Find out what is at `path`. The folder itself may be a link, which the caller named; nothing in it may."""
        if not os.path.isdir(path):
            if not os.path.lexists(path):
                raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
            if path.endswith(".safetensors"):
                return SafetensorsSource(path, shared=self._shared)
            return TorchFileSource(path, mapped=mapped)
        manifest = read_manifest(self._fs, path)
        if manifest is not None:
            return self._open_ours(data_folder(path, manifest), manifest, mapped=mapped, verify=verify)
        try:
            names = self._fs.names(path)
        except OSError as error:
            raise read_failure(path, error) from error
        logger.warning("%s has no manifest, so what is loaded from it cannot be verified", path)
        if ".metadata" in names:
            from .foreign.dcp import StockDcpSource  # importing DCP takes a second, and few loads need it

            return StockDcpSource(self._fs, path, shared=self._shared)
        files = [name for name in names if name.endswith(SINGLE_FILES)]
        if len(files) == 1:
            return self._open(os.path.join(path, files[0]), mapped=mapped, verify=verify)
        found = ", ".join(names[:5]) or "nothing"
        raise CheckpointNotFoundError(
            f"{path} holds no checkpoint ({found}); name the folder of one, with manifest.json or .metadata, or a file."
        )

    def _open_ours(self, path: str, manifest: Mapping[str, Any], *, mapped: bool, verify: bool) -> Source:
        check_files(self._fs, path, manifest)
        form = manifest.get("format")
        if form == "dcp":
            return NativeSource(path, read_tables(self._fs, path, manifest), verify=verify, shared=self._shared)
        if form not in ("safetensors", "torch_save"):
            raise CheckpointLoadError(f"{path} has the format {form!r:.200}, which no reader here knows.")
        rank = self._own_rank(path, manifest)
        (table,) = read_tables(self._fs, path, manifest, [rank])
        if form == "safetensors":
            return NativeSource(path, [table], verify=verify, shared=self._shared)
        name = f"checkpoint_{rank}.pt"
        if name not in {entry["name"] for entry in manifest["files"]}:
            raise CheckpointCorruptError(f"{path} has no file of rank {rank}, {name}.")
        if verify:
            verify_file(path, name, table)
        return TorchFileSource(os.path.join(path, name), mapped=mapped)

    def _own_rank(self, path: str, manifest: Mapping[str, Any]) -> int:
        """Whose part this rank takes, in a format in which every rank has a file of its own."""
        if manifest["world_size"] not in (1, self._world_size):
            raise CheckpointLoadError(
                f"{path} was saved by {manifest['world_size']} ranks with checkpoint/writer={manifest['format']}, in "
                f"which every rank's file is its own, and there are {self._world_size} now; only checkpoints of "
                "checkpoint/writer=dcp load on another number of ranks."
            )
        return self._rank if manifest["world_size"] > 1 else 0


def _nested(source: Source, values: Mapping[str, Any]) -> StateDict:
    try:
        return unflatten({_path(source, key): value for key, value in values.items()}, source.index.containers)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointCorruptError(f"The keys of {source.where} make up no state dict: {error}.") from error


def read_values(
    source: Source, tensors: Iterable[str], objects: Iterable[str], place: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """New tensors and objects for these keys. Tensors that are stored once come back as one."""
    found: dict[str, Any] = {}
    landed: dict[Any, torch.Tensor] = {}
    requests = []
    tensors = list(tensors)
    for key in tensors:
        entry = source.index.tensors[key]
        ready = source.tied(key)
        if ready is not None:
            found[key] = ready
        elif entry.same_as not in landed:
            landed[entry.same_as] = torch.empty(entry.shape, dtype=entry.dtype)
            requests.append(Request.into(key, landed[entry.same_as]))
    source.read_tensors(requests)
    moved: dict[int, torch.Tensor] = {}
    for key in tensors:
        tensor = found[key] if key in found else landed[source.index.tensors[key].same_as]
        if id(tensor) not in moved:
            moved[id(tensor)] = place(tensor)
        found[key] = moved[id(tensor)]
    found.update(source.read_objects(list(objects)))
    return found


def _path(source: Source, key: str) -> Path:
    entry = source.index.tensors.get(key)
    return source.index.objects[key] if entry is None else entry.path


def _placer(map_location: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Where new tensors go, in the ways that `torch.load` takes: device, dict, or function."""
    if map_location is None:
        return lambda tensor: tensor
    if isinstance(map_location, Mapping):
        return _placer(map_location.get("cpu"))
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
