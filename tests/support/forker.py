"""A process that has torch and the package loaded and forks children on request: 15 ms each instead of 3 s.

It is single-threaded, so that its forks are clean, and where the system allows it has mounts of its own, which end with
it. For fault tests it also adopts the orphans of its children, so that no process can get lost. Run as a script it is
the server; the tests use `Forker`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_START_SECONDS = 60.0
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class Ended:
    """How a child ended: exit code (negative: by a signal; None: it did not end and was killed), value, output.

    `stopped` is the process that a failpoint stopped meanwhile.
    """

    code: int | None
    value: Any = None
    output: str = ""
    stopped: int | None = None


class Forker:
    """The tests' side of the server.

    Args:
        modules: what it loads, besides what these import.
        adopts: whether it adopts orphans; these are reaped by `wait` and `drain` alone.

    Attributes:
        unmountable: why nothing can be mounted here; None: it can.
    """

    def __init__(self, modules: Sequence[str], *, adopts: bool) -> None:
        self.unmountable, prefix = _namespace()
        options = {"modules": list(modules), "adopts": adopts, "private": bool(prefix)}
        path = [
            *map(str, (Path(__file__).parent, Path(__file__).parents[1])),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        self._server = subprocess.Popen(
            [*prefix, sys.executable, "-W", "ignore", __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
        )
        self._requests = 0
        assert self._ask(do="hello") == "ready"

    def fork(self, call: str, env: dict[str, str] | None = None, **arguments: Any) -> int:
        """Have a child call `module:function` with the arguments (plain data); returns its process id."""
        return int(self._ask(do="fork", call=call, env=env or {}, arguments=arguments))

    def fork_program(self, call: str, env: dict[str, str] | None = None, **arguments: Any) -> int:
        """As `fork`, but the child ends as every Python program does, exit handlers included; it returns no value."""
        return int(self._ask(do="fork_program", call=call, env=env or {}, arguments=arguments))

    def wait(self, pid: int, timeout: float = 60, fired: str | None = None) -> Ended:
        """Wait until a child ended, or (with `fired`, the log of that name) a failpoint stopped some process."""
        return Ended(**self._ask(do="wait", pid=pid, timeout=timeout, fired=fired))

    def wait_any(self, pids: Sequence[int], timeout: float = 60, fired: str | None = None) -> Ended:
        """Wait until all of them ended, or a failpoint stopped some process; they are to be waited for all the same."""
        return Ended(**self._ask(do="wait_any", pids=list(pids), timeout=timeout, fired=fired))

    def run(self, call: str, env: dict[str, str] | None = None, timeout: float = 60, **arguments: Any) -> Any:
        """Fork, wait, and return what the function returned; its failure is an AssertionError with what it printed."""
        ended = self.wait(self.fork(call, env, **arguments), timeout)
        assert ended.code == 0, f"{call} ended with {ended.code}:\n{ended.output}"
        return ended.value

    def here(self, call: str, **arguments: Any) -> Any:
        """Call a function in the server itself, without a fork: for mounts alone."""
        return self._ask(do="here", call=call, arguments=arguments)

    def drain(self, timeout: float = 20) -> list[str]:
        """Wait until no process that came of any child is left; returns those that are at the deadline."""
        return list(self._ask(do="drain", timeout=timeout))

    def close(self) -> None:
        """End the server; its mounts end with it."""
        if self._server.stdin is not None:
            self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait(10)
        if self._server.stdout is not None:
            self._server.stdout.close()

    def _ask(self, **request: Any) -> Any:
        pipe_in, pipe_out = self._server.stdin, self._server.stdout
        assert pipe_in is not None and pipe_out is not None
        self._requests += 1
        pipe_in.write(json.dumps({"number": self._requests} | request) + "\n")
        pipe_in.flush()
        while True:
            ready, _, _ = select.select([pipe_out], [], [], _START_SECONDS + request.get("timeout", 0))
            line = pipe_out.readline() if ready else ""
            assert line, f"the fork server gave no answer to {request}"
            answer = json.loads(line)
            if answer["number"] == self._requests:  # else of a test that was over before it came
                assert "failed" not in answer, answer["failed"]
                return answer["value"]


def _namespace() -> tuple[str | None, Sequence[str]]:
    """Why nothing can be mounted (or None), and the command that gives a process mounts of its own."""
    flags = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    prefix = ["unshare", *flags, "--propagation", "private"]
    try:
        done = subprocess.run(
            [*prefix, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, timeout=20, check=False
        )
    except FileNotFoundError:
        return "there is no command unshare", []
    return (None, prefix) if done.returncode == 0 else (f"no private mounts here: {done.stderr.strip()}", [])


# --- the server -----------------------------------------------------------------------------------------------------


class _Program(BaseException):
    """In the child of `fork_program`: leads out of the server, so that nothing of it is left in there."""

    def __init__(self, function: Callable[..., object], arguments: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.arguments = arguments


class _Server:
    def __init__(self) -> None:
        self._children: dict[int, tuple[int, int, int]] = {}  # pid -> pidfd, pipe with the result, memory with output
        self._codes: dict[int, int] = {}

    def hello(self) -> str:
        return "ready"

    def fork(self, call: str, env: dict[str, str], arguments: dict[str, Any]) -> int:
        function = _function(call)
        prepare = getattr(sys.modules[function.__module__], "prepare", None)
        if prepare is not None:
            prepare(**arguments)
        pid, result = self._forked(env)
        if pid == 0:
            code = 1
            try:
                value = function(**arguments)
                os.write(result, json.dumps(value).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(result)
        return pid

    def fork_program(self, call: str, env: dict[str, str], arguments: dict[str, Any]) -> int:
        function = _function(call)
        pid, result = self._forked(env)
        os.close(result)
        if pid == 0:
            raise _Program(function, arguments)
        return pid

    def _forked(self, env: dict[str, str]) -> tuple[int, int]:
        """As `os.fork`; and the end of the pipe that the child's value goes into."""
        results, result = os.pipe()
        output = os.memfd_create("output")
        pid = os.fork()
        if pid == 0:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(env)
            faulthandler.register(signal.SIGUSR1, output, all_threads=True)
        else:
            self._children[pid] = (os.pidfd_open(pid), results, output)
        return pid, result

    def wait(self, pid: int, timeout: float, fired: str | None) -> dict[str, Any]:
        _, results, output = self._children[pid]
        found = self.wait_any([pid], timeout, fired)
        if found["code"] is None:
            if "stopped" not in found:
                # It hangs: have it say where, and end it.
                os.kill(pid, signal.SIGUSR1)
                time.sleep(1)
                os.kill(pid, signal.SIGKILL)
            return {**found, "output": _content(output)}
        self._reap()
        code = self._codes.pop(pid)
        told = b""
        while part := os.read(results, 1 << 16):
            told += part
        text = _content(output)
        for fd in self._children.pop(pid):
            os.close(fd)
        return {"code": code, "value": json.loads(told) if told else None, "output": text}

    def wait_any(self, pids: list[int], timeout: float, fired: str | None) -> dict[str, Any]:
        running = {self._children[pid][0] for pid in pids}
        deadline = time.monotonic() + timeout
        while running and time.monotonic() < deadline:
            left = _POLL_SECONDS if fired else deadline - time.monotonic()
            ended, _, _ = select.select(list(running), [], [], max(left, 0))
            running -= {*ended}
            stopped = _stopped(fired) if fired and running else None
            if stopped is not None:
                return {"code": None, "stopped": stopped}
        return {"code": None if running else 0}

    def here(self, call: str, arguments: dict[str, Any]) -> Any:
        return _function(call)(**arguments)

    def drain(self, timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout
        while True:
            self._reap()
            left = _descendants()
            if not left or time.monotonic() > deadline:
                return [f"{pid}: {_command(pid)}" for pid in left]
            time.sleep(_POLL_SECONDS)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._children:
                    self._codes[pid] = os.waitstatus_to_exitcode(status)


def _function(call: str) -> Any:
    module, _, name = call.partition(":")
    return getattr(importlib.import_module(module), name)


def _stopped(log: str) -> int | None:
    from ckpt_component.core.storage.failpoint_fs import read_log

    for operation in read_log(f"{log}.fired"):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{operation.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return operation.pid
    return None


def _descendants() -> list[int]:
    found = [os.getpid()]
    for pid in found:  # grows meanwhile
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found[1:]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "gone"


def _content(memory: int) -> str:
    return os.pread(memory, 1 << 20, 0).decode(errors="replace")


def _know_the_loopback() -> None:
    """Give the children an /etc/hosts with the form of 127.0.0.1 that torch's stores look up at every connection.

    Where that has to ask a name server, each may take 5 s.
    """
    from faults.mounts import bind

    with tempfile.NamedTemporaryFile("w") as hosts:
        hosts.write(Path("/etc/hosts").read_text() + "\n::ffff:127.0.0.1 localhost\n")
        hosts.flush()
        os.chmod(hosts.name, 0o644)
        bind(hosts.name, "/etc/hosts")


def _serve(modules: Sequence[str], adopts: bool, private: bool) -> None:
    if adopts:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.disable()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = [path for path in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    for module in modules:
        importlib.import_module(module)
    if private:
        _know_the_loopback()
    gc.freeze()  # what all children share: none of them goes through it, and copies its pages
    gc.enable()
    server = _Server()
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"number": request.pop("number")}
        try:
            answer["value"] = getattr(server, request.pop("do"))(**request)
        except Exception:
            answer["failed"] = traceback.format_exc()
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    try:
        _serve(**json.loads(sys.argv[1]))
    except _Program as program:
        forked = program
    else:
        sys.exit()
    forked.function(**forked.arguments)
