"""Load a checkpoint of any kind, into a target or into a new dict."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import CheckpointCorruptError, CheckpointLoadError, CheckpointNotFoundError
from ..image.tree import Path, StateDict, unflatten
from ..storage.fs import FsOps
from ..storage.manifest import check_files, read_manifest
from .foreign import SafetensorsSource, TorchFileSource
from .native import NativeSource, read_tables, verify_all
from .source import Request, Source
from .target import Target

logger = logging.getLogger(__name__)


class Reader:
    """Reads checkpoints: ours, verified by their checksums; and those of stock DCP, `torch.save` and safetensors.

    Args:
        rank: who reads; what is this rank's own is looked for under it.
        world_size: how many ranks there are.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self._fs = FsOps()
        self._rank = rank
        self._world_size = world_size

    def read(
        self,
        path: str,
        state_dict: StateDict | None = None,
        *,
        map_location: Any = None,
        allow_dtype_cast: bool = False,
    ) -> tuple[StateDict, list[str]]:
        """Read the checkpoint at `path`.

        Args:
            path: its folder, or the file.
            state_dict: the target, filled in place; None: everything, as a new dict on the CPU.
            map_location: a device or a function as `torch.load` takes it, for tensors that have no target.
            allow_dtype_cast: let a target tensor take values of another dtype.

        Returns:
            The target or the new dict, and the keys of the target that the checkpoint does not have.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError, CheckpointLoadError: see `Checkpointer.load`.
        """
        source = self._open(path, mapped=state_dict is not None)
        place = _placer(map_location)
        with torch.no_grad():
            if state_dict is None:
                values = read_values(source, source.index.tensors, source.index.objects, place)
                by_path = {_path(source, key): value for key, value in values.items()}
                return unflatten(by_path, source.index.containers), []
            target = Target(state_dict, source, self._rank, self._world_size, allow_dtype_cast=allow_dtype_cast)
            source.read_tensors(target.requests)
            fresh = read_values(source, target.new_tensors, target.objects, place)
            return state_dict, target.finish(fresh)

    def _open(self, path: str, *, mapped: bool) -> Source:
        """Find out what is at `path`."""
        if os.path.isfile(path):
            return SafetensorsSource(path) if path.endswith(".safetensors") else TorchFileSource(path, mapped=mapped)
        if not os.path.isdir(path):
            raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
        manifest = read_manifest(self._fs, path)
        if manifest is not None:
            return self._open_ours(path, manifest, mapped)
        names = self._fs.names(path)
        logger.warning("%s has no manifest, so what is loaded from it cannot be verified", path)
        if ".metadata" in names:
            from .stock_dcp import StockDcpSource  # importing DCP takes a second, and few loads need it

            return StockDcpSource(self._fs, path)
        files = [name for name in names if name.endswith((".pt", ".pth", ".bin", ".safetensors"))]
        if len(files) == 1:
            return self._open(os.path.join(path, files[0]), mapped=mapped)
        found = ", ".join(names[:5]) or "nothing"
        raise CheckpointNotFoundError(
            f"{path} holds no checkpoint ({found}); name the folder of one, with manifest.json or .metadata, or a file."
        )

    def _open_ours(self, path: str, manifest: Mapping[str, Any], mapped: bool) -> Source:
        check_files(self._fs, path, manifest)
        if manifest.get("format") == "dcp" or (manifest.get("format") == "safetensors" and manifest["world_size"] == 1):
            return NativeSource(self._fs, path, manifest)
        if manifest.get("format") == "safetensors":
            verify_all(path, read_tables(self._fs, path, manifest))
            return SafetensorsSource(os.path.join(path, self._own_file(path, manifest, ".safetensors")))
        if manifest.get("format") != "torch_save":
            raise CheckpointLoadError(f"{path} has the format {manifest.get('format')!r}, which no reader here knows.")
        verify_all(path, read_tables(self._fs, path, manifest))
        name = self._own_file(path, manifest, ".pt")
        return TorchFileSource(os.path.join(path, name), mapped=mapped)

    def _own_file(self, path: str, manifest: Mapping[str, Any], ending: str) -> str:
        """The file of this rank, in a format in which every rank has one of its own."""
        names = [str(entry["name"]) for entry in manifest["files"] if entry["name"].endswith(ending)]
        if manifest["world_size"] not in (1, self._world_size):
            raise CheckpointLoadError(
                f"{path} was saved by {manifest['world_size']} ranks with checkpoint/writer={manifest['format']}, in "
                f"which every rank's file is its own, and there are {self._world_size} now; only checkpoints of "
                "checkpoint/writer=dcp load on another number of ranks."
            )
        rank = self._rank if manifest["world_size"] > 1 else 0
        for name in names:
            if name.endswith(f"_{rank}{ending}"):
                return name
        raise CheckpointCorruptError(f"{path} has no {ending} file of rank {rank}; there are {', '.join(names)}.")


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
            requests.append(Request(key, landed[entry.same_as]))
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
