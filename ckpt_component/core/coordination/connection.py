"""A connection to the store of the ranks whose calls have a deadline.

The calls of torch's stores wait for an answer without end if the process that holds the store is stopped, or its host
is unreachable. So a thread of the connection makes them, and the caller waits as long as it may. The thread is a
daemon: if the store never answers, neither the caller nor the end of the interpreter waits for it.

A connection of torch's that broke stays broken, so after an error the thread opens another one. A call that may be made
twice is made again at once; of others it is unknown whether they were done, and the caller gets the error.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ...errors import CheckpointTimeoutError, RanksError
from ..outside import OUTSIDE, Latch, Outside, Queue
from .coordinator import distributed

logger = logging.getLogger("ckpt_component.coordination")

#: What a call gets at least, in seconds: past its deadline, or after an earlier call that was not answered.
_LEAST_SECONDS = 1.0
#: A wait is counted in turns of this length, so that time for which this process itself was stopped does not count.
_TURN_SECONDS = 1.0
#: A process that dies may close its connections a moment before it takes no others.
_DYING_SECONDS = 0.2
#: For so long to look whether the process of a store still takes connections.
_LISTEN_SECONDS = 5.0


class _Call:
    """A call that the connection's thread makes."""

    __slots__ = ("done", "error", "function", "given_up", "repeatable", "result")

    def __init__(self, function: Callable[[Any], Any], done: Latch, *, repeatable: bool = False) -> None:
        self.function = function
        self.repeatable = repeatable
        self.given_up = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = done

    def wait(self, seconds: float) -> bool:
        """Wait until it is done; returns whether it is."""
        while not self.done.wait(min(seconds, _TURN_SECONDS)):
            seconds -= _TURN_SECONDS
            if seconds <= 0:
                return False
        return True


class StoreConnection:
    """One connection, with a thread that makes its calls one after the other.

    Args:
        store: a `torch.distributed` store
        timeout: seconds after which a call that was not answered fails
        opens: open another connection to the same store with the first call; else `store` is used itself
        outside: the time and the threads of this rank

    Attributes:
        outside: the same
    """

    def __init__(self, store: Any, timeout: float, *, opens: bool, outside: Outside = OUTSIDE) -> None:
        self.outside = outside
        #: The store; from the first call on the connection, so as not to keep a server of rank 0 alive.
        self._store = [store]
        self._timeout = timeout
        self._calls = outside.queue()
        self._unanswered: _Call | None = None
        self._since = 0.0
        outside.start("ckpt-store", _make_calls, self._calls, self._store, opens, outside)
        # The thread holds no reference to this object, and ends when it is collected.
        weakref.finalize(self, self._calls.put, None).atexit = False

    def another(self) -> StoreConnection:
        """Another connection to the same store. Does not wait: it is opened with its first call."""
        return StoreConnection(self._store[0], self._timeout, opens=True, outside=self.outside)

    @property
    def is_blocked(self) -> bool:
        """Whether a call that its caller gave up has still no answer."""
        return self._unanswered is not None and not self._unanswered.done.is_set

    def call(self, function: Callable[[Any], Any], deadline: float = math.inf, *, repeatable: bool = False) -> Any:
        """Call `function` with the store on the connection's thread, and return what it returns.

        Args:
            function: makes a request; if its answer is late, it is discarded
            deadline: monotonic seconds; the call fails earlier if nothing is answered for `timeout`
            repeatable: whether the request may be made twice

        Raises:
            CheckpointTimeoutError: the store did not answer by the deadline
            RanksError: the store did not answer for `timeout`
            RuntimeError: of the store
        """
        now = self.outside.now()
        timeout = min(self._timeout, _LEAST_SECONDS) if self.is_blocked else self._timeout
        seconds = min(timeout, max(deadline - now, _LEAST_SECONDS))
        call = _Call(function, self.outside.latch(), repeatable=repeatable)
        self._calls.put(call)
        if not call.wait(seconds):
            call.given_up = True
            if not self.is_blocked:
                self._unanswered, self._since = call, now
            raise self._no_answer()
        if call.error is not None:
            raise call.error
        return call.result

    def call_later(self, function: Callable[[Any], Any]) -> None:
        """Like `call`, without waiting: for what must be sent once the store answers again. Errors are logged."""

        def attempt(store: Any) -> None:
            try:
                function(store)
            except Exception as error:
                logger.debug("a late call to the store failed: %s", error)

        self._calls.put(_Call(attempt, self.outside.latch()))

    def holder(self) -> str:
        """Describe the process that holds the store."""
        who, address = "the torchrun agent" if is_held_by_agent() else "rank 0", _address_of(*self._store)
        return who if address is None else f"{who} at {address[0]}:{address[1]}"

    def _no_answer(self) -> CheckpointTimeoutError | RanksError:
        seconds = self.outside.now() - self._since
        text = (
            f"The process that holds the store which all ranks share, {self.holder()}, has not answered for "
            f"{seconds:.0f} s: it is stopped or hangs, or its host cannot be reached"
        )
        if seconds < self._timeout:
            return CheckpointTimeoutError(f"{text}.")
        failures = {} if is_held_by_agent() else {0: "does not answer"}
        causes = dict.fromkeys(failures, RanksError.__name__)
        return RanksError(f"{text} (timeouts.heartbeat={self._timeout:g}).", None, failures, causes)


class MadeHere:
    """The calls of a connection's thread itself, which wait for nothing."""

    is_blocked = False

    def __init__(self, store: Any, outside: Outside) -> None:
        self.outside = outside
        self._store = store

    def call(self, function: Callable[[Any], Any], deadline: float, *, repeatable: bool = False) -> Any:
        """Call a function with the store."""
        return function(self._store)


def is_held_by_agent() -> bool:
    """Whether the store is in the process of torchrun, and so outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _make_calls(calls: Queue, store: list[Any], opens: bool, outside: Outside) -> None:
    while isinstance(call := calls.get(), _Call):
        if call.given_up:
            continue
        while True:
            try:
                if opens:
                    store[0] = another_connection(sys.modules["torch.distributed"], store[0])
                    opens = False
                call.result, call.error = call.function(store[0]), None
            except BaseException as error:
                call.error = call.error or error
                if not opens:
                    outside.sleep(_DYING_SECONDS)
                    opens = _can_be_opened(store[0], outside)
                    if opens and call.repeatable and not call.given_up:
                        continue
            break
        call.done.set()
        del call  # its result may be large


def _can_be_opened(store: Any, outside: Outside) -> bool:
    """Whether another connection to a store can be opened. torch keeps trying for minutes if its process has ended."""
    return hasattr(innermost_store(store), "clone") if _address_of(store) is None else is_held(store, outside)


def is_held(store: Any, outside: Outside) -> bool:
    """Whether the process that holds a store takes connections, where that can be seen."""
    address = _address_of(store)
    if address is not None:
        try:
            outside.connect(address, _LISTEN_SECONDS).close()
        except OSError:
            return False
    return True


def _address_of(store: Any) -> tuple[str, int] | None:
    """Host and port of the process that holds a store; None: it has none, as that of a file."""
    store = innermost_store(store)
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (host, port)


def innermost_store(store: Any) -> Any:
    """The store that wrappers such as `PrefixStore` call."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def another_connection(dist: ModuleType, store: Any) -> Any:
    """Open a new connection to the same store; stores of torch 2.7 have no `clone`.

    Args:
        dist: `torch.distributed`
        store: one of its stores, in use elsewhere

    Raises:
        RanksError: this torch cannot open a second connection to a store of this kind
    """
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, None, False, wait_for_workers=False)
    raise RanksError(
        f"The ranks share a {type(store).__name__}, to which this torch cannot open a second connection; "
        "initialize torch.distributed by env:// or tcp://, or use a newer torch."
    )


def offered_address(outside: Outside) -> str:
    """Where other hosts reach this one; empty, with a warning: nowhere."""
    return _or_empty(lambda: own_address(outside))


def reachable(addresses: Sequence[str], outside: Outside) -> list[str]:
    """On the leading rank: what ranks have offered, as other hosts reach it; empty where that is not known.

    Who reaches the job's store by the loopback is on this host, and others need another address of it.
    """
    far = next((address for address in addresses if address and not is_loopback(address)), None)
    if far is None:
        return [*addresses]
    own = _or_empty(lambda: outside.address_towards(far))
    return [own if address and is_loopback(address) else address for address in addresses]


def _or_empty(find: Callable[[], str]) -> str:
    try:
        return find()
    except OSError as error:
        logger.warning("the address by which other hosts reach this one cannot be found: %s", error)
        return ""


def own_address(outside: Outside) -> str:
    """The address of the interface from which this host reaches the store of the job.

    Raises:
        OSError: as `Outside.address_towards`
    """
    host = None
    if distributed() is not None:
        store = innermost_store(sys.modules["torch.distributed"].distributed_c10d._get_default_store())
        host = getattr(store, "host", None)
    return outside.address_towards(host or outside.environment.get("MASTER_ADDR") or os.uname().nodename)


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
