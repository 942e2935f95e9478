"""What the processes in these tests run. Standard library alone, so that a started process is quick."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any


def append(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def append_index(index: int, path: str) -> None:
    Path(f"{path}.{index}").write_text(f"{index} of {os.getpid()}")


def wait_for(path: str) -> None:
    """Return when a file is there; the test ends the process otherwise."""
    while not os.path.exists(path):
        time.sleep(0.005)


def start_and_wait(started: str, gate: str) -> None:
    append(started, f"{os.getpid()}\n")
    wait_for(gate)


def start_and_wait_at(index: int, started: str, gate: str) -> None:
    start_and_wait(f"{started}.{index}", gate)


def start_and_append(started: str, gate: str, path: str, text: str) -> None:
    start_and_wait(started, gate)
    append(path, text)


def start_and_hang(started: str, cleaned: str = "") -> None:
    try:
        start_and_wait(started, os.devnull + "/never")
    finally:
        if cleaned:
            append(cleaned, "cleaned")


def hang_against_signals(started: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start_and_hang(started)


def hang_against_signals_at(index: int, started: str) -> None:
    hang_against_signals(f"{started}.{index}")


def fail(text: str = "broken on purpose") -> None:
    raise ValueError(text)


def fail_at(index: int, bad_index: int = 0, others: str = "") -> None:
    if index == bad_index:
        fail()
    if others:
        hang_against_signals(others)


def fail_when_started_at(index: int, started: str) -> None:
    """Process 0 fails when process 1, which hangs, is there."""
    if index == 0:
        wait_for(started)
        fail()
    hang_against_signals(started)


def disk_full() -> None:
    try:
        raise OSError(28, "No space left on device", "/some/file")
    except OSError as error:
        raise RuntimeError("cannot write") from error


class NotAnException(BaseException):
    """As torch.distributed.checkpoint's CheckpointException."""

    def __str__(self) -> str:
        raise RuntimeError("no text either")


def raise_base_exception() -> None:
    raise NotAnException


def fail_with_unpicklable_error() -> None:
    raise ValueError("holds a lock", threading.Lock())


def leave(code: int) -> None:
    sys.exit(code)


def leave_at(index: int, code: int) -> None:
    sys.exit(code)


def interrupt_at(index: int) -> None:
    raise KeyboardInterrupt


def kill_me(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def kill_me_at(index: int, number: int) -> None:
    kill_me(number)


def die_with_a_child_at(index: int, child: str, gate: str) -> None:
    """Be killed while a child lives that has inherited the sentinel."""
    if os.fork() == 0:
        start_and_wait(child, gate)
        os._exit(0)
    wait_for(child)
    kill_me(signal.SIGKILL)


def facts(_request: Any = None) -> dict[str, Any]:
    return {"pid": os.getpid(), "torch": "torch" in sys.modules, "argv": sys.argv[0]}


def serve_with(sock: Any, handler: Any) -> None:
    from ckpt_component.compat.worker_main import serve

    serve(sock, lambda: handler)


def serve_never(sock: Any, started: str) -> None:
    start_and_hang(started)


def serve_killed(sock: Any) -> None:
    kill_me(signal.SIGKILL)


def leave_without_a_word(sock: Any) -> None:
    pass


def run(request: tuple[Any, ...]) -> Any:
    """A handler: call the function with the arguments and return what it returns."""
    function, *args = request
    return function(*args)


def lock_of(_value: Any) -> Any:
    return threading.Lock()


def environment(name: str) -> str | None:
    return os.environ.get(name)


def start_a_subprocess(path: str) -> None:
    subprocess.run([sys.executable, "-S", "-c", f"open({path!r}, 'a').write('sub')"], check=True)


# Writers of a CheckpointProcess.


def no_init() -> None:
    pass


def init_marks(path: str, text: str) -> None:
    append(path, text)


def init_fails_first(marker: str) -> None:
    if not os.path.exists(marker):
        append(marker, "failed")
        fail("not yet")


class Writer:
    """Writes what it is given as text. The state tells it to misbehave."""

    def __init__(self, rank_info: Any, log: str = "", returns_future: bool = False) -> None:
        self.rank_info = rank_info
        self.log = log
        self.returns_future = returns_future

    def write(self, state_dict: dict[str, Any], path: str, **kwargs: Any) -> Any:
        if "call" in state_dict:
            function, *args = state_dict["call"]
            function(*args)
        append(path, f"{state_dict} {kwargs} rank {self.rank_info.global_rank} pid {os.getpid()}\n")
        if self.returns_future:
            done: Future[None] = Future()
            threading.Timer(0.05, append_and_resolve, (path, done)).start()
            return done
        return None

    def close(self) -> None:
        if self.log:
            append(self.log, "closed")


def append_and_resolve(path: str, done: Future[None]) -> None:
    append(path, "from the future")
    done.set_result(None)


class TensorWriter:
    def __init__(self, rank_info: Any) -> None:
        pass

    def write(self, state_dict: dict[str, Any], path: str, **kwargs: Any) -> None:
        import torch

        torch.save(state_dict, path)


def save_tensors(state: Any, path: str) -> None:
    import torch

    torch.save(state, path)


class SharedWriter:
    """Looks at tensors in shared memory and writes into one of them; what it saw is its text."""

    def __init__(self, rank_info: Any) -> None:
        pass

    def write(self, state_dict: dict[str, Any], path: str, **kwargs: Any) -> None:
        weights, view = state_dict["weights"], state_dict["view"]
        one_storage = weights.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        append(path, f"{weights[0].item():g} {view[0].item():g} {one_storage} {weights.requires_grad}\n")
        if "go" in kwargs:
            append(kwargs["started"], f"{os.getpid()}\n")
            wait_for(kwargs["go"])
            append(path, f"{weights[0].item():g}\n")
        view[1] = -1.0
        if kwargs.get("die"):
            kill_me(signal.SIGKILL)
