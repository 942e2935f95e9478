"""Suggestions for error messages: what to save instead of an object that a checkpoint does not accept."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import sys
import types
import uuid
from typing import Any

import torch

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
