"""Unpickle without running code: Python's unpickler, with every class replaced by an inert record.

There are three barriers:

1. The opcodes are scanned. Only those of plain data and dataclasses are allowed, and sizes must be consistent with the
   data (a memo number alone can make CPython's unpickler allocate 32 GB).
2. Names are looked up in a table of exact (module, name) pairs. Nothing is imported, and the table has no dotted names,
   which would reach into an object.
3. A name gives a record class created for this load. It stores its arguments and state and does nothing else;
   attributes that a pickle sets on the class are gone after the load.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Opcode -> size of its argument in bytes; if negative, -n bytes that hold the argument's size come first.
_ARGUMENT_BYTES: Mapping[int, int] = {
    **dict.fromkeys(b".()]}lde021tsuaNRbQ", 0),
    **dict.fromkeys(b"\x81\x92\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94", 0),
    **dict.fromkeys(b"K\x80hq", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jjr", 4),
    **dict.fromkeys(b"G\x95", 8),
    **dict.fromkeys(b"\x8a\x8cCU", -1),
    **dict.fromkeys(b"\x8bXBT", -4),
    **dict.fromkeys(b"\x8d\x8e\x96", -8),
}
_GLOBAL, _LONG_BINPUT, _STOP = b"cr."


class Record:
    """Placeholder for an object: its constructor's `args` and its `state`. `kind` is its class name in the pickle."""

    __slots__ = ("args", "state")
    kind: str = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Record:
        """Store the arguments without calling anything."""
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        """Store the state."""
        self.state = state

    def _ignore(self, *_: Any) -> None:
        """Ignore the elements of a class derived from dict, list or set."""

    __setitem__ = append = extend = add = _ignore

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the represented object."""
        # A dataclass with slots has its state as (None, attributes).
        state = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state.get(name, default) if isinstance(state, dict) else default


def record_class(kind: str) -> type[Record]:
    """Create a class of records."""
    return type(kind.replace(".", "_"), (Record,), {"__slots__": (), "kind": kind})


def load_inert(
    data: bytes,
    records: Iterable[tuple[str, str]],
    values: Callable[[str, str], Any] = lambda module, name: None,
    outside: Callable[[Any], Any] | None = None,
) -> Any:
    """Load a pickle, with records in place of objects.

    Args:
        data: the pickle
        records: (module, name) of the allowed classes; each is replaced by a subclass of `Record` made for this load
        values: function that resolves any other (module, name) to an immutable value, or to a class made for this load;
            None refuses the name
        outside: function that resolves persistent ids, references to objects outside the pickle; None refuses them

    Raises:
        Exception: nearly any kind, if the pickle is damaged or uses something that is not allowed
    """
    _scan(data)
    classes = {pair: record_class(pair[1]) for pair in records}

    def size(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple:
            raise pickle.UnpicklingError("it makes a torch.Size of something that is no tuple")
        return value

    class Ordered(dict[Any, Any]):
        def __setstate__(self, state: Any) -> None:
            """Ignore the extra attribute of a module's state dict."""

    class Inert(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in classes:
                return classes[module, name]
            if (module, name) == ("torch", "Size"):
                return size
            if (module, name) == ("collections", "OrderedDict"):
                return Ordered
            value = values(module, name)
            if value is None:
                raise pickle.UnpicklingError(f"it refers to {module}.{name}")
            return value

        def persistent_load(self, pid: Any) -> Any:
            if outside is None:
                raise pickle.UnpicklingError("it refers to an outside object")
            return outside(pid)

    return Inert(io.BytesIO(data)).load()


def _scan(data: bytes) -> None:
    """Walk over the opcodes without running them.

    Raises:
        pickle.UnpicklingError: there is an opcode that plain data does not need, or a size beyond the data
    """
    position, end, steps = 0, len(data), 0
    sizes = _ARGUMENT_BYTES
    while position < end:
        code = data[position]
        position += 1
        steps += 1
        following = sizes.get(code)
        if following is None:
            if code != _GLOBAL:
                raise pickle.UnpicklingError(f"it has the opcode {bytes([code])!r}")
            for _ in range(2):
                position = data.find(b"\n", position) + 1
                if not position:
                    raise pickle.UnpicklingError("it ends in the middle of a name")
        elif following >= 0:
            if code == _LONG_BINPUT and int.from_bytes(data[position : position + 4], "little") > steps:
                raise pickle.UnpicklingError("it has a memo number beyond its own length")
            if code == _STOP:
                return
            position += following
        else:
            count = int.from_bytes(data[position : position - following], "little")
            position += count - following
            if position > end:
                raise pickle.UnpicklingError(f"it has a string or number of {count} bytes and is too short")
    raise pickle.UnpicklingError("it ends without a STOP opcode")
