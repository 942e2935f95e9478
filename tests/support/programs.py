"""Run Python programs to their end, in processes forked from one that has torch loaded, which takes 3 s."""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kept_configs import compose_once
from ranks import finish_ranks, fork_server

#: Below pytest's own timeout, so that a program that hangs is ended here, with what it printed and where it is.
_SECONDS = 100.0


def run_program(
    arguments: Sequence[str],
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    apart: bool = False,
    timeout: float = _SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a folder, as `subprocess.run` does.

    Args:
        arguments: a script or `-m module`, and what follows; no other option of the interpreter
        folder: the working directory
        env: variables besides those of this process
        apart: return stderr by itself, and not in stdout
        timeout: seconds; a program that takes longer is killed

    Raises:
        AssertionError: it took longer; with what it printed and where it was
    """
    # As the test has it by now; the server has what was there when it began.
    variables = {**os.environ, **(env or {})}
    with tempfile.NamedTemporaryFile("r", errors="replace") as errors:
        server = fork_server()
        words: dict[str, Any] = {"arguments": list(arguments), "folder": str(folder)}
        child = server.fork("programs:run_and_leave", variables, errors=errors.name if apart else "", **words)
        ended = server.wait(child, timeout)
        assert ended.code is not None, f"{arguments} took more than {timeout:g} s:\n{ended.output}{errors.read()}"
        return subprocess.CompletedProcess(words["arguments"], ended.code, ended.output, errors.read())


def run_on_ranks(arguments: Sequence[str], folder: Path, ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` on so many ranks, with the variables that torchrun sets; see `run_program`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    words: dict[str, Any] = {"arguments": list(arguments), "folder": str(folder), "errors": ""}
    children = [
        fork_server().fork(
            "programs:run_and_leave", {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **words
        )
        for rank in range(ranks)
    ]
    ended = finish_ranks(children, _SECONDS)
    return [subprocess.CompletedProcess(words["arguments"], -1 if e.code is None else e.code, e.output) for e in ended]


def prepare(**_: Any) -> None:
    """In the server, before the fork: have Hydra find its plugins, and learn to read an override."""
    compose_once("sync")


def run_and_leave(arguments: Sequence[str], folder: str, errors: str) -> None:
    """Be the program; and of the interpreter's end what others can see."""
    if errors:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    os.chdir(folder)
    # An interpreter does that when it starts, and this one started before.
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    name, *rest = arguments
    code: object = 0
    try:
        if name == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [name, *rest], folder
            # Its globals live until the end, as those of a program do.
            kept = runpy.run_path(name, run_name="__main__")  # noqa: F841
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(str(code or 0)))
