"""What several ranks hold alike and one of them stores: is it really alike? Short digests tell, seldom and bounded.

A look compares a few thousand values, and of a large one a sample that is spread over it; the next look goes on where
the last one ended.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from .flatten import FlatState, keys_of
from .structure import Structure

#: Values in one look of a rank, and of all ranks together.
_AT_ONCE, _ALL_AT_ONCE = 4096, 1 << 20
#: Bytes of one value, spread over all of it. So a rank looks at 64 MB at most.
_SAMPLE_BYTES, _PIECES = 16 << 10, 64
#: Elements of all Python objects in a look, and the fewest and most of one: of a longer list its first ones, of a
#: longer dict its keys, or only their number.
_ELEMENTS, _FEWEST, _MOST = 1 << 16, 16, 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Neighbours: [number of the first, number of its group, how many].
Run = list[int]


def runs_of(numbers: Sequence[tuple[int, int]]) -> list[Run]:
    """Pairs of numbers that both grow by one from pair to pair, as runs."""
    runs: list[Run] = []
    for number, group in numbers:
        if runs and number == runs[-1][0] + runs[-1][2] and group == runs[-1][1] + runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([number, group, 1])
    return runs


def _pairs_of(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """The inverse of `runs_of`."""
    return [(number + offset, group + offset) for number, group, count in runs for offset in range(count)]


class Replicas:
    """The values of this rank that others hold as well. What they have in common has a group number, alike on all.

    Args:
        structure: of all that the rank has.
        share: from `share_out`; the groups of objects come first.
        world_size: how many ranks.
    """

    def __init__(self, structure: Structure, share: Mapping[str, list[Any]], world_size: int) -> None:
        self._structure = structure
        self._objects: list[Run] = share["shared_objects"]
        self._tensors: list[Run] = share["shared_tensors"]
        # These are the same on all ranks.
        objects, tensors = share["groups"]
        self._at_once = max(1, min(_AT_ONCE, _ALL_AT_ONCE // world_size))
        self._looks = max(1, -(-(objects + tensors) // self._at_once))
        self._budget = min(max(_ELEMENTS // max(min(objects, self._at_once), 1), _FEWEST), _MOST)

    def message(self, flat: FlatState, look: int) -> dict[str, Any]:
        """The digests of those values that come in this look, for `differing`.

        Args:
            flat: a state of the structure.
            look: counts the looks.
        """
        first = look % self._looks * self._at_once
        groups = range(first, first + self._at_once)
        objects = [pair for pair in _pairs_of(self._objects) if pair[1] in groups]
        tensors = [pair for pair in _pairs_of(self._tensors) if pair[1] in groups]
        sums = array("I", [object_digest(flat.objects[number], self._budget) for number, _ in objects])
        sums.extend(tensor_digests([flat.tensors[self._structure.stored[number].tensor] for number, _ in tensors]))
        runs = runs_of([(group, group) for _, group in (*objects, *tensors)])
        return {"runs": runs, "sums": base64.b64encode(sums.tobytes()).decode()}

    def keys(self, groups: Collection[int]) -> list[str]:
        """The keys of those groups that this rank has."""
        structure = self._structure
        paths = [structure.object_paths[number] for number, group in _pairs_of(self._objects) if group in groups]
        stored = [structure.stored[number] for number, group in _pairs_of(self._tensors) if group in groups]
        return keys_of([*paths, *(structure.tensor_paths[each.tensor] for each in stored)])


def differing(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The groups whose digests differ, each with the first rank that has it: [group, rank].

    Args:
        messages: of `Replicas.message`, by rank; an empty one for a rank that has nothing to compare.
    """
    alike: dict[tuple[str, str], int] = {}  # most ranks have the same message
    for rank, message in enumerate(messages):
        if message:
            alike.setdefault((repr(message["runs"]), message["sums"]), rank)
    if len(alike) < 2:
        return []
    first: dict[int, tuple[int, int]] = {}
    different: dict[int, int] = {}
    for rank in alike.values():
        sums = array("I", base64.b64decode(messages[rank]["sums"]))
        for (_, group), digest in zip(_pairs_of(messages[rank]["runs"]), sums, strict=True):
            other, first_rank = first.setdefault(group, (digest, rank))
            if other != digest:
                different[group] = first_rank
    return [[group, rank] for group, rank in sorted(different.items())]


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A short digest of each: of its form and a sample of its elements. Copies the samples of a device at once."""
    samples = list(map(_sample, tensors))
    places: dict[torch.device, list[int]] = {}
    for number, sample in enumerate(samples):
        places.setdefault(sample.device, []).append(number)
    sums = [0] * len(tensors)
    for numbers in places.values():
        together = torch.cat([samples[number] for number in numbers]).cpu()
        data = memoryview((ctypes.c_ubyte * together.numel()).from_address(together.data_ptr()))
        start = 0
        for number in numbers:
            end, tensor = start + samples[number].numel(), tensors[number]
            form = f"{tensor.dtype} {list(tensor.shape)}".encode()
            sums[number] = zlib.crc32(data[start:end], zlib.crc32(form))
            start = end
    return sums


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, or of pieces that are spread over it; the same ones however it is laid out."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.numel() * tensor.itemsize <= _SAMPLE_BYTES:
        return tensor.contiguous().view(-1).view(torch.uint8)
    width = _SAMPLE_BYTES // _PIECES // tensor.itemsize
    gap = (tensor.numel() - width) // (_PIECES - 1)
    starts, within = (torch.arange(count, device=tensor.device) for count in (_PIECES, width))
    elements = tensor.view(_INTEGERS.get(tensor.itemsize, tensor.dtype))  # `take` knows no 8-bit floats
    return torch.take(elements, starts[:, None] * gap + within).view(-1).view(torch.uint8)


def object_digest(value: Any, budget: int = _MOST) -> int:
    """A short digest of a Python object, of so many of its elements. The order of dicts and sets does not matter."""
    return int.from_bytes(_digest(value, budget)[:4], "little")


def _digest(value: Any, budget: int) -> bytes:
    kind = type(value)
    size = len(value) if kind in (dict, OrderedDict, set, list, tuple, str, bytes) else 0
    if kind in (dict, OrderedDict, set):
        # Every element has the same share, so that their order does not decide which of them count.
        elements = value if kind is set else value.items()
        parts = sorted(_digest(element, budget // size) for element in elements) if size <= budget else []
    elif kind in (list, tuple):
        parts = [_digest(element, budget // min(size, budget)) for element in value[:budget]]
    elif kind in (str, bytes):
        data = value if kind is bytes else value.encode(errors="surrogatepass")
        parts = [data[:_SAMPLE_BYTES], data[-_SAMPLE_BYTES:]]
    elif isinstance(value, torch.Tensor):
        parts = [repr(tensor_digests([value])).encode()]
    elif hasattr(value, "tobytes"):  # of numpy
        step = max(-(-value.nbytes // _SAMPLE_BYTES), 1)
        parts = [f"{value.dtype} {value.shape}".encode(), value.flat[::step].tobytes()]
    else:
        parts = [repr(value).encode()]
    return hashlib.blake2b(b"|".join([f"{kind.__name__} {size}".encode(), *parts]), digest_size=8).digest()
