"""Pickle a value now, so that later changes by the caller have no effect.

Plain `pickle`, and not the pickler of `multiprocessing`: that one moves the storage of every CPU tensor to shared
memory and sends a descriptor, so that the receiver sees later changes, and needs a descriptor per tensor. Only where
the caller asks for it, tensors that lie in shared memory already go as that memory.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..errors import CheckpointStageError
from .shared_storage import SharingPickler

_MAX_DEPTH = 16


def pickle_by_value(
    value: Any, what: str, *, parts: Mapping[str, Any], fix: str, shared: list[Any] | None = None
) -> bytes:
    """Pickle a value.

    Args:
        value: anything that plain `pickle` takes; tensors go by value.
        what: names the whole in the error message.
        parts: the members of `value` by the names that the user knows them by.
        fix: what to do about a value that cannot be pickled, as a clause.
        shared: tensors in shared memory go by reference, and this gets what must live until they have been used. None:
            they go by value too.

    Raises:
        CheckpointStageError: something cannot be pickled; the message names it.
    """
    try:
        if shared is None:
            return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        stream = io.BytesIO()
        SharingPickler(stream, shared).dump(value)
        return stream.getvalue()
    except (MemoryError, OSError):
        raise
    except Exception as error:  # __reduce__ of a foreign class may raise anything
        culprit = _find_culprit(parts)
        because = f", because {culprit[0]} is {_describe(culprit[1])}" if culprit else ""
        detail = culprit[2] if culprit else error
        raise CheckpointStageError(
            f"{what} cannot be sent to another process{because} ({type(detail).__name__}: {detail}). {fix}"
        ) from error


def _find_culprit(parts: Mapping[str, Any]) -> tuple[str, Any, Exception] | None:
    """The innermost part that cannot be pickled: its name, itself, and why."""
    culprit: tuple[str, Any, Exception] | None = None
    members = list(parts.items())
    for _ in range(_MAX_DEPTH):
        for name, member in members:
            error = _pickling_error(member)
            if error is not None:
                culprit = (name, member, error)
                members = list(_members_of(name, member))
                break
        else:
            break
    return culprit


def _pickling_error(value: Any) -> Exception | None:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return error
    return None


def _members_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, partial):
        yield f"{name}.func", value.func
        yield f"{name}.args", value.args
        yield f"{name}.keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield f"{name}[{key!r}]", member
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, member in enumerate(value):
            yield f"{name}[{index}]", member
    elif not isinstance(value, (type, types.FunctionType, types.ModuleType)) and hasattr(value, "__dict__"):
        for key, member in vars(value).items():
            yield f"{name}.{key}", member


def _describe(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        if value.__name__ == "<lambda>":
            return "a lambda"
        if "<locals>" in value.__qualname__:
            return f"the function {value.__name__}, which is defined inside another function"
        return f"the function {value.__module__}.{value.__qualname__}"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"
