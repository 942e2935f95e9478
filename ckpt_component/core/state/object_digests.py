"""Short digests of Python objects, independent of the order of dicts and sets."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import torch

from .tensor_samples import SAMPLE_BYTES, tensor_digests

#: Maximum number of elements per object. Of a longer list the first ones are compared, of a longer dict the number.
MOST = 4096


def object_digest(value: Any, budget: int = MOST) -> int:
    """A short digest of at most `budget` elements of a Python object, independent of the order of dicts and sets."""
    return int.from_bytes(_digest(value, budget)[:4], "little")


def _digest(value: Any, budget: int) -> bytes:
    kind = type(value)
    size = len(value) if kind in (dict, OrderedDict, set, list, tuple, str, bytes) else 0
    if kind in (dict, OrderedDict, set):
        # Split the budget evenly, so that the order of the elements does not matter.
        elements = value if kind is set else value.items()
        parts = sorted(_digest(element, budget // size) for element in elements) if size <= budget else []
    elif kind in (list, tuple):
        parts = [_digest(element, budget // min(size, budget)) for element in value[:budget]]
    elif kind in (str, bytes):
        data = value if kind is bytes else value.encode(errors="surrogatepass")
        parts = [data[:SAMPLE_BYTES], data[-SAMPLE_BYTES:]]
    elif isinstance(value, torch.Tensor):
        parts = [repr(tensor_digests([value])).encode()]
    elif hasattr(value, "tobytes"):  # of numpy
        step = max(-(-value.nbytes // SAMPLE_BYTES), 1)
        parts = [f"{value.dtype} {value.shape}".encode(), value.flat[::step].tobytes()]
    else:
        parts = [repr(value).encode()]
    return hashlib.blake2b(b"|".join([f"{kind.__name__} {size}".encode(), *parts]), digest_size=8).digest()
