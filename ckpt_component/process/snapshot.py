"""A Python value as bytes, taken now: what the caller changes afterwards changes nothing in the bytes.

Plain `pickle`, and not the pickler of `multiprocessing`: that one moves the storage of a CPU tensor to shared memory
and sends a descriptor, so that the receiver sees later changes, and needs a descriptor per tensor.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..errors import CheckpointStageError

_MAX_DEPTH = 16


def snapshot(value: Any, what: str, *, parts: Mapping[str, Any], fix: str) -> bytes:
    """Pickle a value.

    Args:
        value: anything that plain `pickle` takes; tensors go by value.
        what: names the whole in the error text.
        parts: the members of `value` by the names that the user knows them by.
        fix: what to do about a value that cannot be pickled, as a clause.

    Raises:
        CheckpointStageError: something cannot be pickled; the text names it.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # __reduce__ of a foreign class may raise anything
        found = _find_culprit(parts)
        because = f", because {found[0]} is {_describe(found[1])}" if found else ""
        detail = found[2] if found else error
        raise CheckpointStageError(
            f"{what} cannot be sent to another process{because} ({type(detail).__name__}: {detail}). {fix}"
        ) from error


def _find_culprit(parts: Mapping[str, Any]) -> tuple[str, Any, Exception] | None:
    """The innermost part that cannot be pickled: its name, itself, and why."""
    found: tuple[str, Any, Exception] | None = None
    members = list(parts.items())
    for _ in range(_MAX_DEPTH):
        for name, member in members:
            error = _pickling_error(member)
            if error is not None:
                found = (name, member, error)
                members = list(_members_of(name, member))
                break
        else:
            break
    return found


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
