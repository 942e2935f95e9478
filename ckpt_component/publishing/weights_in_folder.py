"""`Weights`: a version of published weights in a folder on this host, as arrays or tensors that view its files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..core.storage.locate import file_storage
from ..core.storage.safe_open import open_regular
from ..errors import CheckpointNotFoundError
from ..formats import open_index
from .copy_state import read_state

if TYPE_CHECKING:
    import numpy as np
    import torch

#: Dtypes that numpy does not have -> those of the same width in which their bits are shown.
_AS_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@dataclass(frozen=True)
class Weights:
    """A version of published weights, which `follow` yields.

    Attributes:
        version: number of the version
        step: training step of the checkpoint; None: unknown
        path: a Hugging Face folder on this host, for `from_pretrained` and for engines that load from disk. It has this
            version until the next one is asked for.
        changed: names of the tensors that differ from the version that was yielded before; None: all may
        nbytes: bytes that were read from the source
        lag: seconds from the commit of the checkpoint until it was here; None: unknown, or it was here before
    """

    version: int
    step: int | None
    path: str
    changed: frozenset[str] | None
    nbytes: int
    lag: float | None

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """The weights as numpy arrays that view the files; what is written into one changes no file.

        numpy has neither bfloat16 nor float8: these are their bits, as uint16 and uint8.

        Raises:
            CheckpointNotFoundError: the folder has another version by now
        """
        import numpy as np

        for view in self._views():
            dtype = np.dtype(_AS_BITS.get(view.dtype, view.dtype))
            yield view.name, np.ndarray(view.shape, dtype, view.file, view.offset)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as tensors on the CPU, as `load_weights` of vLLM and SGLang takes them.

        They view the files; what is written into one changes no file.

        Raises:
            CheckpointNotFoundError: the folder has another version by now
        """
        import torch

        for view in self._views():
            dtype = getattr(torch, view.dtype)
            if 0 in view.shape:
                tensor = torch.empty(view.shape, dtype=dtype, device="cpu")
            else:
                count = view.nbytes // dtype.itemsize
                tensor = torch.frombuffer(view.file, dtype=dtype, count=count, offset=view.offset).view(view.shape)
            yield view.name, tensor

    def _views(self) -> Iterator[_MappedTensor]:
        contents = open_index(file_storage(), self.path).contents
        places = {name: contents.ranges_at(entry.place)[0] for name, entry in contents.tensors.items()}
        files = {name: _mapped(os.path.join(self.path, name)) for name in {place.file for place in places.values()}}
        # Each file was opened by its path: all of them are of one version if the folder is still at it.
        state = read_state(file_storage(), self.path)
        if state is None or state.version != self.version:
            there = "no version" if state is None else f"version {state.version}"
            raise CheckpointNotFoundError(
                f"{self.path} has {there} by now, not {self.version}; use what follow() yielded last."
            )
        seen = set()
        for name, entry in contents.tensors.items():
            if entry.place not in seen:  # another name of a tensor that is tied is not in the files
                seen.add(entry.place)
                place = places[name]
                yield _MappedTensor(name, entry.dtype, entry.shape, entry.nbytes, files[place.file], place.offset)


class _MappedTensor(NamedTuple):
    """A tensor in a mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: mmap.mmap
    offset: int


def _mapped(path: str) -> mmap.mmap:
    fd = open_regular(path)
    try:
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
