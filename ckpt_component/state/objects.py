"""Encode Python objects in a form that `torch.load(weights_only=True)` can load.

It cannot load numpy values (mostly RNG states), so they are stored as tagged tensors, which `decode` converts back.
Types outside the list in `docs/state.md` are refused, by key, when the snapshot is taken.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import random
import sys
import types
import uuid
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, CheckpointStageError
from .dtypes import WIDTHS
from .paths import TAG
from .shards import is_made_of_tensors, is_spread
from .tensors import has_plain_bytes

#: Expressions by type, the first match counts; `x` is the value.
_BY_TYPE: tuple[tuple[tuple[type, ...], str], ...] = (
    ((enum.Enum,), "x.value or x.name"),
    ((pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID), "str(x)"),
    ((torch.Generator,), "x.get_state()"),
    ((random.Random,), "x.getstate()"),
    ((datetime.timedelta,), "x.total_seconds()"),
    ((datetime.date, datetime.time), "x.isoformat()"),  # a datetime is a date
    ((argparse.Namespace, types.SimpleNamespace), "vars(x)"),
    ((collections.deque, range, list), "list(x)"),
    ((frozenset, set), "set(x)"),
    ((dict, types.MappingProxyType), "dict(x)"),
    ((str,), "str(x)"),
    ((bytearray, memoryview, bytes), "bytes(x)"),
    ((int,), "int(x)"),
    ((float,), "float(x)"),
)


def is_config(value: object) -> bool:
    """Whether a value is an OmegaConf config. Flattened as a dict, it would lose its interpolations."""
    omegaconf = sys.modules.get("omegaconf")  # if it was never imported, there are no configs
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def suggestion_for(value: object) -> str:
    """What to save instead, for an error message: 'save dataclasses.asdict(x) instead'."""
    expression = _expression(value)
    return "convert it, or keep it out of the state dict" if expression is None else f"save {expression} instead"


def _expression(value: Any) -> str | None:
    if is_config(value):
        return "OmegaConf.to_container(x)"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict(x)"
    if isinstance(value, tuple):
        return "x._asdict()" if hasattr(value, "_asdict") else "tuple(x)"
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            return "numpy.asarray(x)"
        if isinstance(value, numpy.random.Generator):
            return "x.bit_generator.state"
        if isinstance(value, numpy.random.BitGenerator):
            return "x.state"
        if isinstance(value, numpy.random.RandomState):
            return "x.get_state()"
    return next((text for kinds, text in _BY_TYPE if isinstance(value, kinds)), None)


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
#: Dtypes of less than a byte, which `torch.save` does not support.
PACKED_DTYPES = frozenset(
    value
    for bits in range(1, 8)
    for name in (f"int{bits}", f"uint{bits}")
    if isinstance(value := getattr(torch, name, None), torch.dtype)
)
#: A view of integers as one of these says that it is not quantized, and torch ends the process on what is loaded.
QUANTIZED_DTYPES = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
#: Those that a load knows and can restore. A newer torch may have more, which must not end up in a checkpoint.
STORED_DTYPES = (
    frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype) and str(value)[6:] in WIDTHS)
    - PACKED_DTYPES
    - QUANTIZED_DTYPES
)
_ALLOWED = (
    "dict, list, tuple, set, numbers, str, bytes, None, tensors, numpy arrays and numbers, torch.Size, dtype and device"
)


#: Levels of a state, and of an object in it. Python, and torch's pickler, recurse several times as deep.
DEEPEST = 200


def encode(value: Any, key: str, parents: tuple[int, ...] = ()) -> Any:
    """Copy a value into a form that loads with `weights_only`; shares nothing mutable with the original.

    Args:
        value: a value of the state dict
        key: its flat key, for error messages
        parents: ids of the containers around it

    Raises:
        CheckpointStageError: the value contains a type that safe loading would refuse, or is nested too deeply
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in _CONTAINERS:
        if id(value) in parents:
            raise CheckpointStageError(f"'{key}' contains itself, which cannot be checkpointed.")
        if len(parents) >= DEEPEST:
            raise CheckpointStageError(f"'{key}' is nested more than {DEEPEST} levels deep; flatten it.")
        encoded = partial(encode, key=key, parents=(*parents, id(value)))
        if kind not in (dict, OrderedDict):
            if _ATOMS.issuperset(map(type, value)):  # such as the names of all parameters
                return kind(value)
            return kind(map(encoded, value))
        if TAG in value:
            raise CheckpointStageError(f"'{key}' has the dict key {TAG!r}, which is reserved.")
        return kind(zip(map(encoded, value), map(encoded, value.values()), strict=True))
    if isinstance(value, torch.Tensor):
        check_tensor(value, key)
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    numpy = sys.modules.get("numpy")  # if numpy was never imported, there are no numpy values
    if numpy is not None and (kind in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)):
        return _encode_numpy(numpy, value, key)
    raise CheckpointStageError(
        f"'{key}' holds a {kind.__module__}.{kind.__qualname__}, which safe loading would refuse; "
        f"{suggestion_for(value)}. Checkpoints take {_ALLOWED} (docs/state.md#what-is-refused-and-what-to-do)."
    )


def _encode_numpy(numpy: Any, value: Any, key: str) -> dict[str, Any]:
    array = numpy.ascontiguousarray(value)
    if array.dtype.kind not in "biufc":
        raise CheckpointStageError(
            f"'{key}' holds a numpy value of dtype {array.dtype}; only numeric dtypes work, so save its .tolist()."
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=True)
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    data = torch.frombuffer(native, dtype=torch.uint8) if native.size else nothing
    kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
    shape = list(numpy.shape(value))
    return {TAG: kind, "dtype": native.dtype.str, "shape": shape, "data": data}


def decode(value: Any) -> Any:
    """The inverse of `encode`, applied to loaded values. Needs numpy if numpy values were saved."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value
    if kind not in (dict, OrderedDict):
        return kind(map(decode, value))
    if TAG in value:
        return _decode_numpy(value)
    return kind(zip(map(decode, value), map(decode, value.values()), strict=True))


def _decode_numpy(value: dict[str, Any]) -> Any:
    import numpy

    data = value["data"].to(torch.uint8)
    if not data.is_contiguous():  # a hostile file can make one byte look like terabytes with a stride of 0
        raise ValueError("its bytes are not stored one after the other")
    raw = data.view(-1).numpy().tobytes()
    array = numpy.frombuffer(raw, dtype=value["dtype"]).reshape(value["shape"]).copy()
    return array if value[TAG] == "array" else array[()]


def dump(value: Any) -> bytes:
    """Serialize an encoded object as a `torch.save` archive, as stock DCP does."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def refuse_fake_tensors() -> None:
    """Refuse to save or load inside a mode that makes tensors without memory, also of what is made here.

    Raises:
        CheckpointError: `FakeTensorMode`, or one like it, is active
    """
    kind = type(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if kind is not torch.Tensor:
        raise CheckpointError(
            f"A mode of torch that is active makes each tensor a {kind.__name__}, which has no memory; save and load "
            "outside of it."
        )


def check_tensor(tensor: torch.Tensor, key: str) -> None:
    """Refuse, by key, tensors that cannot be restored from their bytes alone."""
    problem = None
    if is_spread(tensor):
        problem = (f"holds a {type(tensor).__name__} in a tuple or another object", "put it into a dict or a list")
    elif is_lazy(tensor):
        problem = ("is not initialized yet", "run the module on one batch first")
    elif tensor.device.type == "meta":
        problem = ("is on the meta device and has no data", "materialize it first")
    elif tensor.is_nested:
        problem = ("is a nested tensor", "save its .unbind() as a list")
    elif tensor.layout is not torch.strided:
        problem = (f"is sparse ({tensor.layout})", "save .to_dense(), or its indices and values")
    elif tensor.is_quantized:
        problem = ("is quantized", "save .int_repr() with its scale and zero point")
    elif tensor.dtype in QUANTIZED_DTYPES:
        problem = (f"is {tensor.dtype} without a scale", "save the integers that it is a view of")
    elif tensor.dtype in PACKED_DTYPES:
        problem = (f"is {tensor.dtype}", "save its .view(torch.uint8)")
    elif tensor.dtype not in STORED_DTYPES:
        problem = (f"is {tensor.dtype}, of a torch newer than this package", "save its .view(torch.uint8)")
    elif is_made_of_tensors(tensor):
        problem = (
            f"holds a {type(tensor).__name__}, made of tensors, in a tuple or another object",
            "put it into a dict or a list, or save the tensors that it is made of",
        )
    elif not has_plain_bytes(tensor):
        problem = (f"is a {type(tensor).__name__}, which does not say what it is made of", "save plain tensors")
    if problem is not None:
        raise CheckpointStageError(f"'{key}' {problem[0]}, which cannot be checkpointed; {problem[1]}.")
