"""What a load reads from, the contents of a checkpoint by key; and which tensors it can fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..core.progress import Progress, no_progress
from ..core.spelling import warn_deprecated
from ..core.storage.file_set import FileSet
from ..errors import CheckpointLoadError
from ..state.coverage import Region
from ..state.key_map import KeyMap, RenamedKeys, names_above
from ..state.paths import key_of
from ..state.tensors import BATCH, plain_address, plain_addresses
from ..state.wrapped_modules import without_wrappers
from .index import Contents, Entry

#: By the name after `torch.`. Names from a file are looked up here: attributes of torch can import modules.
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
#: The other way round.
DTYPE_NAMES = {value: str(value).removeprefix("torch.") for value in DTYPES.values()}
#: Why a tensor on the meta device cannot be filled if it is not one of a module's.
ON_META = (
    "is on the meta device and no parameter or buffer of a module in the target; pass the module itself, which then "
    "gets memory, or give it memory with to_empty(device=...)"
)
#: Tensors of so many bytes are made on a storage: where torch is deterministic, `torch.empty` fills what it makes.
_LARGE = 1 << 20
_SHAPE, _DTYPE = map(attrgetter, ("shape", "dtype"))


class Access(NamedTuple):
    """How the files of a checkpoint are read.

    Attributes:
        open_files: opens those of a folder, as `Storage.open_files`
        verify: compare checksums, where there are any
        mapped: tensors are only copied from, so that a file may be mapped into memory
    """

    open_files: Callable[[str], FileSet]
    verify: bool = True
    mapped: bool = False


class Request(NamedTuple):
    """A request to read the tensor `key`, or a part of it, into `destination`.

    Attributes:
        destination: a tensor of matching shape and dtype, with any device and strides
        offsets: offsets of the part in the whole, one per dimension; None: the whole is read
        address: the destination's `plain_address`
    """

    key: str
    destination: torch.Tensor
    offsets: tuple[int, ...] | None
    address: int | None

    @classmethod
    def into(cls, key: str, destination: torch.Tensor, offsets: tuple[int, ...] | None = None) -> Request:
        """A request for this tensor as destination."""
        return cls(key, destination, offsets, plain_address(destination))

    @property
    def region(self) -> Region:
        """The part as (offsets, sizes)."""
        return self.offsets or (0,) * self.destination.dim(), tuple(self.destination.shape)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The requested part of the whole tensor."""
        offsets, sizes = self.region
        for dimension, (start, count) in enumerate(zip(offsets, sizes, strict=True)):
            whole = whole.narrow(dimension, start, count)
        return whole


def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    offset: int = 0,
    stride: Sequence[int] = (),
) -> torch.Tensor:
    """A tensor with the memory of a storage, to be filled; without `stride`, a contiguous one."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, shape, stride)


def _new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor on the CPU, to be filled."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    with torch.inference_mode(False):  # what is loaded in that mode may be trained outside of it
        if nbytes >= _LARGE:
            return tensor_on(torch.UntypedStorage(nbytes, device="cpu"), dtype, shape)
        return torch.empty(shape, dtype=dtype, device="cpu")


def copy_into(destination: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Copy a value into a tensor of the target, or a part of one.

    Raises:
        CheckpointLoadError: torch refuses the copy
    """
    try:
        # Outside of inference mode torch refuses to fill a tensor that was made there; threads that read are outside.
        with torch.inference_mode(destination.is_inference()), torch.no_grad():
            destination.copy_(value)
    except RuntimeError as error:
        raise CheckpointLoadError(f"'{key}' in the target cannot be filled: {error}") from error


class Source(ABC):
    """A checkpoint to load from.

    Attributes:
        where: what messages call it, its path
        contents: what it has
        verifies_first: whether everything is to be read within `verified`
        shared: whether all ranks have the same contents
    """

    where: str
    contents: Contents
    verifies_first = False
    shared = True

    def verified(self, rank: int, world_size: int) -> AbstractContextManager[None]:
        """Verify all bytes, or this rank's share of them. Until the context ends they stay, and are not verified again.

        Raises:
            CheckpointCorruptError: the stored bytes are damaged
        """
        return nullcontext()

    @abstractmethod
    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Fill all destinations.

        Args:
            requests: what to read, and where to
            progress: follows the bytes

        Raises:
            CheckpointCorruptError: the stored bytes are damaged
        """

    @abstractmethod
    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """The Python objects of these keys."""

    def new_tensors(self, keys: Iterable[str], progress: Progress = no_progress) -> dict[str, torch.Tensor]:
        """The tensors of these keys in new memory. Those that are stored once stay tied.

        Raises:
            CheckpointCorruptError: the stored bytes are damaged
            CheckpointLoadError: this torch does not have a dtype
        """
        stored: dict[Any, torch.Tensor] = {}
        requests, tensors = [], {}
        for key in keys:
            entry = self.contents.tensors[key]
            tie = entry.dtype, entry.place
            if tie not in stored:
                stored[tie] = _new_tensor(entry.shape, self.dtype_of(entry))
                requests.append(Request.into(key, stored[tie]))
            tensors[key] = stored[tie]
        self.read_tensors(requests, progress)
        return tensors

    def dtype_of(self, entry: Entry) -> torch.dtype:
        """The dtype of a tensor.

        Raises:
            CheckpointLoadError: this torch does not have it
        """
        if entry.dtype not in DTYPES:
            raise CheckpointLoadError(
                f"'{entry.key}' in {self.where} is {entry.dtype}, which torch {torch.__version__} does not have."
            )
        return DTYPES[entry.dtype]


class RenamedSource(Source):
    """A checkpoint under other keys. Only the keys differ: messages about its files name those that are stored.

    Args:
        source: the checkpoint
        contents: its contents under new keys
        old: new key -> the key in the checkpoint, where they differ
        values: objects that are not the checkpoint's, by key
    """

    def __init__(
        self, source: Source, contents: Contents, old: Mapping[str, str], values: Mapping[str, Any] | None = None
    ) -> None:
        self.where, self.contents = source.where, contents
        self._source, self._old, self._values = source, old, values or {}

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read the tensors under the keys that they are stored with."""
        old = self._old
        if old:
            requests = [Request(old.get(key, key), into, offsets, address) for key, into, offsets, address in requests]
        self._source.read_tensors(requests, progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Read the objects under the keys that they are stored with."""
        stored = {key: self._old.get(key, key) for key in keys if key not in self._values}
        values = self._source.read_objects([*dict.fromkeys(stored.values())])
        return {key: values[stored[key]] if key in stored else self._values[key] for key in keys}

    def new_tensors(self, keys: Iterable[str], progress: Progress = no_progress) -> dict[str, torch.Tensor]:
        """As of the checkpoint; a tensor that two keys have now is the same one."""
        stored = {key: self._old.get(key, key) for key in keys}
        tensors = self._source.new_tensors(dict.fromkeys(stored.values()), progress)
        return {key: tensors[old] for key, old in stored.items()}


def why_unfillable(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be filled, and what to do; None if it can. `ON_META` if it can if it gets memory."""
    if is_lazy(tensor):
        return "is not initialized yet; run the module on one batch before the load"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"is {'nested' if tensor.is_nested else f'sparse ({tensor.layout})'}; load into a dense tensor"
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: several of its elements are the same memory; load into its .contiguous()"
    return ON_META if tensor.is_meta else None


def addresses_if_matching(entries: Sequence[Entry | None], tensors: Sequence[torch.Tensor]) -> list[int | None] | None:
    """The tensors' addresses, as `plain_addresses`; None if they must be matched one by one.

    That is the case if one has no entry, differs in shape or dtype, or cannot be filled directly.
    """
    if None in entries:
        return None
    addresses: list[int | None] = []
    try:
        for first in range(0, len(tensors), BATCH):
            some, stored = tensors[first : first + BATCH], entries[first : first + BATCH]
            if list(map(_SHAPE, stored)) != list(map(_SHAPE, some)):
                return None
            if list(map(_DTYPE, stored)) != list(map(DTYPE_NAMES.get, map(_DTYPE, some))):
                return None
            addresses += plain_addresses(some)
        if None in addresses:
            for tensor, address in zip(tensors, addresses, strict=True):
                if address is None and why_unfillable(tensor) is not None:
                    return None
    except RuntimeError:  # an uninitialized tensor has no shape
        return None
    return addresses


def memory_of(tensor: torch.Tensor) -> Any:
    """What identifies a tensor's memory and its view of it; None if it has no memory of its own.

    A tensor on the meta device has an identity like that, though no memory.
    """
    try:
        if tensor.is_meta:
            return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
        return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.data_ptr() else None
    except RuntimeError:  # such as a sparse or an uninitialized tensor
        return None


class MappedSource(RenamedSource):
    """A checkpoint under the keys that a key map gives it.

    Args:
        source: the checkpoint
        key_map: its new keys

    Raises:
        CheckpointLoadError: a rename fits no key, takes a whole key away, or gives two values one key
    """

    def __init__(self, source: Source, key_map: KeyMap) -> None:
        self._key_map = key_map
        self._renamed = renamed = RenamedKeys(source.contents.paths(), key_map, source.where)
        super().__init__(source, source.contents.renamed(renamed), renamed.old)
        self._unused = renamed.unused
        ignored_names = key_map.ignored_names()
        above = {name for key in self._old for name in names_above(key)} if ignored_names else set()
        #: Names in the target whose values stay as they are.
        self._ignored = {name for key in renamed.ignored for name in (key, without_wrappers(key))}
        self._ignored.update(name for name in ignored_names if name not in above)
        #: Names in `ignore` that only the target may have.
        self._for_target = frozenset(self._unused)
        self._retire_unwrapping()
        renamed.refuse_unused("rename")

    def check_ignored(self, keys: Iterable[str]) -> None:
        """Refuse a name in `ignore` that fits no key of the checkpoint and none of these, which a target has.

        Raises:
            CheckpointLoadError: there is such a name
        """
        for key in keys if self._unused else ():
            for name in self._key_map.ignoring(key):
                self._unused.pop(name, None)
        self._renamed.refuse_unused()

    def _retire_unwrapping(self) -> None:
        """Accept a rename that fits no key if it takes away a wrapper's part: checkpoints of wrapped modules had it."""
        for name in [name for name, argument in self._unused.items() if argument == "rename"]:
            old, new = ".".join(filter(None, (self._key_map.prefix, name))), self.new_name(name)
            if without_wrappers(old) == without_wrappers(new):
                del self._unused[name]
                warn_deprecated(f"{name!r} in rename", "no rename, as modules load into any wrapping", removed_in="0.5")

    def new_name(self, name: str) -> str:
        """The new name of a value, from its name in the checkpoint."""
        return key_of(self._key_map.renamed(name, tuple(name.split(".")))[1])

    def is_ignored(self, key: str) -> bool:
        """Whether the value of a target's key stays as it is, because of `ignore`."""
        if any(name in self._ignored for name in names_above(key)):
            return True
        names = self._key_map.ignoring(key)
        return bool(names) and (self._key_map.keeps_names or any(name in self._for_target for name in names))
