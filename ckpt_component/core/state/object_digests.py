"""Digests of Python objects, independent of the order of dicts and sets."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from operator import itemgetter
from typing import Any

import torch

from .dense_tensors import tensor_bytes
from .full_digests import bytes_of
from .tensor_samples import SAMPLE_BYTES, tensor_digests

#: Maximum number of elements per object. Of a longer list the first ones are compared, of a longer dict the number.
MOST = 4096
#: Types whose `repr` has the whole value.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def object_digest(value: Any, budget: int | None = MOST) -> int:
    """A digest of at most `budget` elements of a Python object; None: of all, and of all their bytes."""
    return int.from_bytes(_digest(value, budget), "little")


def _digest(value: Any, budget: int | None) -> bytes:
    kind = type(value)
    size = len(value) if kind in (dict, OrderedDict, set, list, tuple, str, bytes) else 0
    parts: list[bytes | memoryview]
    plain = _all_plain(value) if budget is None else None
    if plain is not None:
        parts = [plain]
    elif kind in (dict, OrderedDict, set):
        # Split the budget evenly, so that the order of the elements does not matter.
        elements = value if kind is set else value.items()
        each = None if budget is None else budget // max(size, 1)
        parts = [*sorted(_digest(element, each) for element in elements)] if each != 0 else []
    elif kind in (list, tuple):
        each = None if budget is None else budget // max(min(size, budget), 1)
        parts = [_digest(element, each) for element in value[:budget]]
    elif kind in (str, bytes):
        data = value if kind is bytes else value.encode(errors="surrogatepass")
        parts = [data] if budget is None else [data[:SAMPLE_BYTES], data[-SAMPLE_BYTES:]]
    elif isinstance(value, torch.Tensor):
        parts = _of_tensor(value) if budget is None else [repr(tensor_digests([value])).encode()]
    elif hasattr(value, "tobytes"):  # of numpy
        step = 1 if budget is None else max(-(-value.nbytes // SAMPLE_BYTES), 1)
        parts = [f"{value.dtype} {value.shape}".encode(), value.flat[::step].tobytes()]
    else:
        parts = [repr(value).encode()]
    return hashlib.blake2b(b"|".join([f"{kind.__name__} {size}".encode(), *parts]), digest_size=8).digest()


def _all_plain(value: Any) -> bytes | None:
    """The `repr` of a container of plain values, which is much faster than a digest of each; None: it is another."""
    kind = type(value)
    if kind in (list, tuple) and _PLAIN.issuperset(map(type, value)):
        return repr(value).encode(errors="surrogatepass")
    if (
        kind in (dict, OrderedDict)
        and {str}.issuperset(map(type, value))
        and _PLAIN.issuperset(map(type, value.values()))
    ):
        return repr(sorted(value.items(), key=itemgetter(0))).encode(errors="surrogatepass")
    return None


def _of_tensor(tensor: torch.Tensor) -> list[bytes | memoryview]:
    memory = bytes_of(tensor).cpu()
    form = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return [form, tensor_bytes(memory)]
