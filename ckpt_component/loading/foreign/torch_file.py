"""Files of `torch.save`, read by torch.

Only the checksums inside of our own single files are verified here: foreign files need not have any.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...core.formats.index import Contents, Entry
from ...core.formats.torch_archive import check_archive, verify_records
from ...core.progress import Progress, no_progress
from ...core.storage.locate import is_url
from ...core.storage.safe_open import read_failure
from ...core.storage.storage import Storage
from ...errors import CheckpointCorruptError, CheckpointLoadError, CheckpointStageError
from ...state.flatten import flatten
from ...state.paths import key_of
from ..source import DTYPE_NAMES, Access, Request, Source, copy_into
from .archives import decode_all, load_safely, refused_kind

#: A tensor may be larger than its file if it repeats stored elements (`expand`), up to this many bytes.
_MOST_REPEATED = 64 << 20


class StateSource(Source):
    """A state dict that is loaded already.

    Args:
        state: the state dict
        where: where it comes from, for messages
        mapped: its tensors are mapped from a file, so they can only be copied from

    Raises:
        CheckpointLoadError: it is not a state dict of plain data
    """

    def __init__(self, state: Any, where: str, *, mapped: bool = False) -> None:
        kind = refused_kind(state) if not isinstance(state, Mapping) else None
        if kind is not None:
            raise CheckpointLoadError(
                f"{where} holds a {kind}, which safe loading refuses. If you trust the file, load it with "
                "torch.load(weights_only=False) yourself."
            )
        if not isinstance(state, Mapping):
            raise CheckpointLoadError(
                f"{where} holds a {type(state).__name__}, not a state dict; use torch.load for it."
            )
        try:
            flat = flatten(state)
        except (CheckpointStageError, RecursionError) as error:
            raise CheckpointLoadError(f"{where} does not hold a valid state dict: {error}") from error
        self.tensors = {key_of(path): value for path, value in zip(flat.tensor_paths, flat.tensors, strict=True)}
        self._objects = {key_of(path): value for path, value in zip(flat.object_paths, flat.objects, strict=True)}
        self._mapped = mapped
        entries = [Entry(key_of(path), path, "", (), 0, ()) for path in flat.object_paths]
        for path, (key, tensor) in zip(flat.tensor_paths, self.tensors.items(), strict=True):
            # Tied tensors have the same memory.
            memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else key
            entries.append(Entry(key, path, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, memory))
        self.where, self.contents = where, Contents.of(entries, flat.containers)

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Copy from the loaded or mapped tensors."""
        total = sum(request.destination.nbytes for request in requests)
        with progress(f"reading {os.path.basename(self.where)}", total) as advance:
            for request in requests:
                copy_into(request.destination, request.part_of(self.tensors[request.key]), request.key)
                advance(request.destination.nbytes)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Decode the Python objects."""
        return dict(
            zip(keys, decode_all({f"'{key}' in {self.where}": self._objects[key] for key in keys}), strict=True)
        )

    def new_tensors(self, keys: Iterable[str], progress: Progress = no_progress) -> dict[str, torch.Tensor]:
        """The loaded tensors themselves, which share storages with tied ones; copies of those of a mapped file."""
        return super().new_tensors(keys, progress) if self._mapped else {key: self.tensors[key] for key in keys}


class TorchFileSource(StateSource):
    """A file of `torch.save` of another program, or a single file of ours, loaded with `weights_only`.

    Args:
        fs: the storage
        path: the file
        access: `mapped`: map the file into memory instead of reading it; objects of a bucket are always read

    Raises:
        CheckpointCorruptError: it is not a regular file, is damaged, or claims more data than it has
        CheckpointUnreadableError: it cannot be read
        CheckpointLoadError: it does not contain a state dict of plain data
    """

    def __init__(self, fs: Storage, path: str, access: Access) -> None:
        folder, name = os.path.split(path)
        mapped = access.mapped and not is_url(path)
        with fs.open_files(folder) as files, files.stream(name) as stream:
            size = files.size(name)
            state = load_stream(stream, size, path, mapped=mapped, verify=access.verify)
        super().__init__(state, path, mapped=mapped)
        for key, tensor in self.tensors.items():
            if tensor.nbytes > max(size, _MOST_REPEATED):
                raise CheckpointCorruptError(
                    f"'{key}' in {path} has the shape {tuple(tensor.shape)}, which is {tensor.nbytes} bytes, and the "
                    f"file has {size}."
                )


def verify_torch_file(fs: Storage, path: str) -> bool:
    """Compare the checksums in a file of `torch.save`. Returns False if it has none.

    Raises:
        CheckpointCorruptError: it is not a regular file, or is damaged
        CheckpointUnreadableError: it cannot be read
    """
    folder, name = os.path.split(path)
    try:
        with fs.open_files(folder) as files, files.stream(name) as stream:
            if not zipfile.is_zipfile(stream):
                return False
            check_archive(stream, files.size(name), path)
            return verify_records(stream, path)
    except OSError as error:
        raise read_failure(path, error) from error


def load_stream(stream: Any, size: int, path: str, *, mapped: bool = False, verify: bool = False) -> Any:
    """Load a file of `torch.save`, with `weights_only`.

    Args:
        stream: the file, at its beginning; readable and seekable
        size: bytes of the file
        path: the file, for messages
        mapped: map it into memory, if it is a zip archive
        verify: compare the checksums in it, if it has them

    Raises:
        CheckpointCorruptError: it is damaged, or claims more data than it has
        CheckpointUnreadableError: it cannot be read
        CheckpointLoadError: it has objects that safe loading refuses
    """
    try:
        # Files of torch before 1.6 are not zip archives and cannot be mapped.
        zipped = zipfile.is_zipfile(stream)
        if zipped:
            check_archive(stream, size, path)
            if verify:
                verify_records(stream, path)
        stream.seek(0)
        if not zipped:
            with torch.inference_mode(False):  # as in `load_safely`
                return torch.load(stream, map_location="cpu", weights_only=True)
        # Mapping needs a path; this one leads to the file just checked, even if `path` is replaced after that.
        return load_safely(f"/proc/self/fd/{stream.fileno()}" if mapped else stream, mmap=mapped)
    except CheckpointCorruptError:
        raise
    except pickle.UnpicklingError as error:
        stream.seek(0)
        if not zipped and stream.read(1) != pickle.PROTO:  # which begins every pickle of torch
            raise CheckpointLoadError(f"{path} is not a file of torch.save.") from error
        raise CheckpointLoadError(
            f"{path} holds Python objects that safe loading refuses: {_first_line(error)} "
            "If you trust the file, load it with torch.load(weights_only=False) yourself."
        ) from error
    except OSError as error:
        raise read_failure(path, error) from error
    except Exception as error:  # torch.load raises nearly anything on damaged bytes
        raise CheckpointCorruptError(
            f"{path} cannot be read as a torch.save file ({type(error).__name__}: {_first_line(error)})."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch puts the reason last, after advice on how to disable the check.
    reasons = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line]
    return (reasons or lines or [type(error).__name__])[0]
