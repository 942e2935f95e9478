"""`SimulatedStore`: a `torch.distributed` store for simulated processes, which fails where a test says.

A connection is ordered and reliable, as TCP is: a message arrives late, or the connection breaks and stays broken. When
it breaks, the request was done or not, and its sender cannot tell. A store whose process is stopped answers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .simulation import SimulatedProcess

#: For so long torch's `get` waits for a key that is not there.
_GET_SECONDS = 300.0


@dataclass(frozen=True)
class MessageFault:
    """What happens to a request.

    Attributes:
        kind: `lost`: it does not arrive, and the connection breaks. `unanswered`: it is done, and the connection breaks
            before the answer. `late`: it arrives late; so do those behind it. `stopped`, `killed`: its sender is,
            before it arrives.
        seconds: how late, or stopped for how long
    """

    kind: str
    seconds: float = 0.0


class SimulatedStore:
    """The process that holds the store, and what it holds.

    Args:
        holder: its process; when that is killed, or stopped, so is the store
        faults: what happens to the requests with these numbers, counted from 1

    Attributes:
        requests: number of requests so far
        values: what it holds
    """

    def __init__(self, holder: SimulatedProcess, faults: Mapping[int, MessageFault] | None = None) -> None:
        self.holder = holder
        self.requests = 0
        self.values: dict[str, bytes] = {}
        self._faults = {} if faults is None else faults

    def connect(self, process: SimulatedProcess) -> SimulatedConnection:
        """A connection for one thread of a process."""
        return SimulatedConnection(self, process)

    def fault(self) -> MessageFault | None:
        """Count a request; returns what happens to it."""
        self.requests += 1
        return self._faults.get(self.requests)


class SimulatedConnection:
    """A connection to a simulated store, with the methods of torch's that this package calls.

    Args:
        store: the store
        process: whose connection it is
    """

    def __init__(self, store: SimulatedStore, process: SimulatedProcess) -> None:
        self._store = store
        self._process = process
        self._is_broken = False

    def clone(self) -> SimulatedConnection:
        """Another connection."""
        self._process.turn()
        if self._store.holder.is_dead:
            raise RuntimeError("connection refused (simulated)")
        return SimulatedConnection(self._store, self._process)

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        with _StoreRequest(self) as values:
            values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        """A value; waits for it."""
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values; waits for them."""
        simulation = self._process.simulation
        deadline = simulation.now + _GET_SECONDS
        while True:
            with _StoreRequest(self) as values:
                if all(key in values for key in keys):
                    return [values[key] for key in keys]
            if simulation.now > deadline:
                raise RuntimeError(f"wait timeout after {_GET_SECONDS:g} s (simulated), keys: {', '.join(keys)}")
            simulation.park(simulation.now + 0.1)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        with _StoreRequest(self) as values:
            return all(key in values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        with _StoreRequest(self) as values:
            total = int(values.get(key, b"0")) + amount
            values[key] = b"%d" % total
            return total

    def delete_key(self, key: str) -> bool:
        """Delete a value; returns whether it was there."""
        with _StoreRequest(self) as values:
            return values.pop(key, None) is not None

    def arrive(self) -> MessageFault | None:
        """Let a request travel to the store; returns what happens to it there."""
        store, simulation = self._store, self._process.simulation
        if self._is_broken:
            raise RuntimeError("broken pipe (simulated)")
        fault = store.fault()
        if fault is not None and fault.kind == "stopped":
            self._process.stop(fault.seconds)
        elif fault is not None and fault.kind == "killed":
            self._process.kill()
        self._process.turn()
        if fault is not None and fault.kind == "late":
            simulation.park(simulation.now + fault.seconds)
        while simulation.now < store.holder.stopped_until and not store.holder.is_dead:
            simulation.park(store.holder.stopped_until)
        if store.holder.is_dead or (fault is not None and fault.kind == "lost"):
            self.break_off()
        return fault

    def break_off(self) -> None:
        """The connection breaks. Raises RuntimeError."""
        self._is_broken = True
        raise RuntimeError("connection reset by peer (simulated)")

    @property
    def values(self) -> dict[str, bytes]:
        """What the store holds."""
        return self._store.values


class _StoreRequest:
    """A request, which is done in one step once it has arrived."""

    __slots__ = ("_connection", "_fault")

    def __init__(self, connection: SimulatedConnection) -> None:
        self._connection = connection

    def __enter__(self) -> dict[str, bytes]:
        self._fault = self._connection.arrive()
        return self._connection.values

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._fault is not None and self._fault.kind == "unanswered":
            self._connection.break_off()
