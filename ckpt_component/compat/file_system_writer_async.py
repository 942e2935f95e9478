"""`FileSystemWriterAsync`: NVRx's storage writer for torch.distributed.checkpoint, built on the image.

It starts no process: it returns a function that writes, and its arguments, and a caller runs it in any process. Results
come back through memory of this process that the function opens, separate for each save. They need no manager process
and no file, so a full disk does not prevent the report of an error, and a save never sees the results of another.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import queue
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..core.storage.files import FileStorage
from ..core.storage.locate import file_storage
from ..errors import CheckpointSaveError
from ..formats.dcp import check_separation_hint
from ..formats.writer import groups_of_files
from ..state.objects import check_tensor
from . import bucket_io
from .bucket_io import METADATA, FilesImage, ImageLease, WriteBucket, preload_tensors
from .host_image import ImageBucket, ResultMailbox
from .peers import this_rank

#: Number of folders whose metadata is cached; that of a large model can exceed 100 MB.
_KEPT = 2


class CachedMetadataFileSystemReader(FileSystemReader):
    """torch's reader, with metadata shared by all readers of a folder.

    The reference keeps stale metadata when a folder is saved again; this class compares time, size and inode of the
    file on each use.

    Args:
        path: folder of the checkpoint
        cache_metadata: False: read the file each time
    """

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint. The object is shared; do not modify it.

        Raises:
            FileNotFoundError: there is no checkpoint in the folder
        """
        if not self._cache_metadata:
            return super().read_metadata(*args, **kwargs)
        folder = os.path.abspath(os.fspath(self.path))
        file = os.stat(os.path.join(folder, METADATA))
        return _metadata_of(folder, file.st_mtime_ns, file.st_size, file.st_ino)

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Empty the cache.

        Args:
            path: as in the reference; the cache is emptied for all folders
        """
        _metadata_of.cache_clear()


@functools.lru_cache(maxsize=_KEPT)
def _metadata_of(folder: str, *_identity: int) -> Metadata:
    return FileSystemReader(folder).read_metadata()


logger = logging.getLogger(__name__)

#: What replaces NVRx's options.
_INSTEAD = {
    "is_multiproc_io": "each file has a writing thread, which does not hold the GIL",
    "use_cached_data_structure": "plans and memory are kept by save_state_dict_async_plan(metadata_cache=...)",
    "use_cpu_shm_for_gpu_tensors": "all tensors are copied to shared host memory in any case",
    "open_file": "files are written through their descriptors, by the operations of fs_ops",
}

#: The reference keeps its queue here.
_results_queue: Any = None

#: An error as DCP gathers it from ranks: the exception and its traceback.
WrappedException = tuple[BaseException, traceback.StackSummary]


class FileSystemWriterAsync(FileSystemWriter):
    """Writes the files of one save in the background. Make one writer for each save.

    Order of use: plan (`save_state_dict_async_plan`, which calls `prepare_write_data`), `get_save_function_and_args`,
    run the function, `retrieve_write_results`, and on the coordinator `finish`.

    Args:
        *args: as for `torch.distributed.checkpoint.FileSystemWriter`. `thread_count` is the number of files and
            parallel writers per rank; `single_file_per_rank` must be True.
        separation_hint: keys with this prefix are written to separate files, whose names start with it too. Needs a
            `thread_count` of at least 2.
        use_msc: as in the reference; refused, because object storage is not supported
        fs_ops: file operations; None: those of the file system, with syncs if `sync_files`
        image_memory: host memory reused by the writers of a series of saves; None: new memory. Planning with a
            `CheckpointMetadataCache` passes it.
        is_multiproc_io: as in NVRx; has no effect here, and a warning says so once. The same for the next three.
        use_cached_data_structure: see above
        use_cpu_shm_for_gpu_tensors: see above
        open_file: see above
        **kwargs: as `*args`

    Raises:
        NotImplementedError: `single_file_per_rank=False`, a `serialization_format` other than torch's, or transforms
        CheckpointConfigError: `separation_hint` with one thread, or not valid in a file name
    """

    def __init__(
        self,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        fs_ops: FileStorage | None = None,
        image_memory: list[FilesImage] | None = None,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        open_file: Callable[..., Any] = open,
        **kwargs: Any,
    ) -> None:
        # Megatron looks these names up in the signature.
        given = (is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors, open_file is not open)
        for name, value in zip(_INSTEAD, given, strict=True):
            if value:
                log_once(f"FileSystemWriterAsync({name}=...) does nothing: {_INSTEAD[name]}.")
        super().__init__(*args, **kwargs)
        if not self.single_file_per_rank:
            raise NotImplementedError("FileSystemWriterAsync needs single_file_per_rank=True.")
        if getattr(getattr(self, "serialization_format", None), "name", "TORCH_SAVE") != "TORCH_SAVE":
            raise NotImplementedError("FileSystemWriterAsync needs serialization_format=TORCH_SAVE.")
        if getattr(getattr(self, "transforms", None), "extensions", None):
            raise NotImplementedError("FileSystemWriterAsync takes no _extensions: it fixes all bytes beforehand.")
        if use_msc:
            raise NotImplementedError("FileSystemWriterAsync has no object storage; leave use_msc=False.")
        check_separation_hint(separation_hint, self.thread_count, "separation_hint", "thread_count")
        self.separation_hint = separation_hint
        self.can_run_decentralized_global_plan = True
        #: What to write, from `prepare_write_data`, as (path, name, (byte items, tensor items)).
        self.write_buckets: list[WriteBucket] | None = None
        #: An object with `put` and `get_nowait` that the writing process can use. None: there is nothing to write.
        self.results_queue: Any = None
        self._ops = fs_ops or file_storage(durable=self.sync_files)
        self.image_memory = image_memory
        self._lease = ImageLease(image_memory)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create and sync the folder; otherwise as in torch."""
        self._ops.make_folders(os.path.abspath(self.path))
        return super().prepare_local_plan(plan)

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Name this rank's files by its rank, as the coordinator would, without asking it."""
        return dataclasses.replace(local_plan, storage_data=_StoragePrefix(f"__{this_rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Assign the items of the plan to files. Byte items are encoded now, tensors are copied by `preload_tensors`.

        Args:
            plan: the finished plan of this rank
            planner: provides bytes and tensors of its items

        Raises:
            CheckpointStageError: a tensor cannot be stored; the message names its key
        """
        self.write_buckets = []
        self._lease = ImageLease(self.image_memory)
        values = [_resolved(planner, item) for item in plan.items]
        sizes = [value.nbytes if isinstance(value, torch.Tensor) else len(value) for value in values]
        hint = self.separation_hint or ""
        separate = {number for number, item in enumerate(plan.items) if hint and item.index.fqn.startswith(hint)}
        for group, numbers in groups_of_files(sizes, self.thread_count, hint, separate):
            items: list[tuple[WriteItem, Any]] = [(plan.items[number], values[number]) for number in numbers]
            bytes_data = [pair for pair in items if isinstance(pair[1], bytes)]
            tensor_data = [pair for pair in items if isinstance(pair[1], torch.Tensor)]
            name = f"{group}{plan.storage_data.prefix}{len(self.write_buckets)}{DEFAULT_SUFFIX}"
            self.write_buckets.append((self.fs.concat_path(self.path, name), name, (bytes_data, tensor_data)))
        self.results_queue = ResultMailbox() if self.write_buckets else None

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], list[ImageBucket]] | None, Sequence[Any]]:
        """Return what to run, in this process or another.

        Returns:
            The function that writes; the function that copies tensors to host memory, whose result replaces argument 1
            of the first; and the arguments of the first. (None, None, ()) if this rank writes nothing.
        """
        if not self.write_buckets:
            return None, None, ()
        return (
            functools.partial(self.write_preloaded_data_multiproc, [], ops=self._ops),
            functools.partial(self.preload_tensors, self.write_buckets, True, self._lease),
            [this_rank(), self.write_buckets, self.results_queue],
        )

    preload_tensors = staticmethod(preload_tensors)
    write_preloaded_data_multiproc = staticmethod(bucket_io.write_preloaded_data_multiproc)
    write_preloaded_data = staticmethod(bucket_io.write_preloaded_data)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Not part of an asynchronous save; torch's own FileSystemWriter saves at once."""
        raise NotImplementedError(
            "FileSystemWriterAsync.write_data: use prepare_write_data and get_save_function_and_args."
        )

    def retrieve_write_results(self) -> list[WriteResult] | WrappedException:
        """Return what the save function wrote on this rank, or its error. Does not wait and does not raise that error.

        Call it when the function is done. Frees the copy of the tensors.
        """
        if self.write_buckets is None:
            raise RuntimeError("retrieve_write_results comes after prepare_write_data.")
        if self.results_queue is None:
            return []
        try:
            result, is_done = self.results_queue.get_nowait(), True
        except queue.Empty:
            why = "the process that writes has died, or is not done yet"
            result, is_done = CheckpointSaveError(f"Rank {this_rank()} wrote no results: {why}."), False
        self._lease.end(reuse=is_done)
        if not isinstance(result, BaseException) and len(result) != len(self.write_buckets):
            missed = f"Rank {this_rank()} wrote {len(result)} of {len(self.write_buckets)} files."
            result = CheckpointSaveError(missed)
        if isinstance(result, BaseException):
            return result, traceback.StackSummary.from_list(getattr(result, "frames", []))
        return [
            WriteResult(item.index, length, _StorageInfo(key, offset, length))
            for number, (_, key, (bytes_data, tensor_data)) in enumerate(self.write_buckets)
            for (item, _), (offset, length) in zip((*bytes_data, *tensor_data), result[number], strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint by writing `.metadata` atomically. Call this only on the coordinator.

        Args:
            metadata: global metadata; not changed
            results: write results by rank

        Raises:
            OSError: it could not be written; no checkpoint is visible then
        """
        storage = {result.index: result.storage_data for part in results for result in part}
        complete = dataclasses.replace(metadata, storage_data=storage, storage_meta=self.storage_meta())
        self._ops.write_over(os.path.join(self.path, bucket_io.METADATA), pickle.dumps(complete, protocol=4))

    def storage_meta(self) -> StorageMeta | None:
        """As torch's, with the path as a string, because other Python versions cannot unpickle a pathlib path."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)


def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
    """Return an empty queue with the methods of the reference's; this package does not use it.

    The results of a `FileSystemWriterAsync` are returned through memory of their own save, so that results of two saves
    cannot be mixed up. This queue needs no process and stays empty.

    Args:
        mp_mode: as in the reference: start method of its manager process
    """
    return queue.Queue()


@functools.cache
def log_once(text: str) -> None:
    """Warn once per text, because each save has its own writer."""
    logger.warning(text)


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor | bytes:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        return bytes(value.getbuffer())
    tensor = value.detach()
    check_tensor(tensor, item.index.fqn)
    return tensor
