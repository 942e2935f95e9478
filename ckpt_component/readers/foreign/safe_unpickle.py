"""Unpickling without running anything: a pickle's own machine, with every class replaced by an inert record.

Three barriers, one behind the other. The opcodes are scanned first: only those that a pickle of plain data and
dataclasses has, and no claim of a size that is not there (a memo number alone can make CPython's unpickler take 32 GB).
Then names are looked up in a table of exact pairs; nothing is imported, and a dotted name, which would reach into an
object, is not in it. What a name gives is a record made for this one load: it keeps its arguments and its state and
does nothing, and what a pickle might set on its class ends with the load.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Opcode -> what follows it: a fixed number of bytes; or, negative, bytes whose count stands in the first -n bytes.
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
    """What stands for an object: `args` that it was made of, and its `state`. `kind` is the name in the pickle."""

    __slots__ = ("args", "state")
    kind: str = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Record:
        """Keep the arguments, and call nothing."""
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def _ignore(self, *_: Any) -> None:
        """What a pickle puts into an object that is a dict, list or set is of no use here."""

    __setitem__ = append = extend = add = _ignore

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the object that this stands for."""
        # A dataclass with slots has its state as (None, attributes).
        state = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state.get(name, default) if isinstance(state, dict) else default


def record_class(kind: str) -> type[Record]:
    """A new class of records."""
    return type(kind.replace(".", "_"), (Record,), {"__slots__": (), "kind": kind})


def load_inert(
    data: bytes,
    records: Iterable[tuple[str, str]],
    values: Callable[[str, str], Any] = lambda module, name: None,
    outside: Callable[[Any], Any] | None = None,
) -> Any:
    """What a pickle holds, with records for objects.

    Args:
        data: the pickle.
        records: (module, name) of the classes that may occur; each becomes a subclass of `Record` made for this load.
        values: what another (module, name) stands for: something immutable, or a class made for this load; None refuses
            it.
        outside: what a reference to an outside object stands for; None refuses them.

    Raises:
        Exception: nearly anything, when the pickle is damaged or asks for what is not allowed.
    """
    _scan(data)
    classes = {pair: record_class(pair[1]) for pair in records}

    def size(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple:
            raise pickle.UnpicklingError("it makes a torch.Size of something that is no tuple")
        return value

    class Ordered(dict[Any, Any]):
        def __setstate__(self, state: Any) -> None:
            """State dicts of modules have a further attribute."""

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
        pickle.UnpicklingError: an opcode that plain data does not need, or a size that the data does not have.
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
                raise pickle.UnpicklingError(f"it has a text or number of {count} bytes and ends before")
    raise pickle.UnpicklingError("it ends before its end")
