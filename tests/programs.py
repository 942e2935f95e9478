"""Run Python programs to their end, in processes forked from one that has torch loaded, which takes 3 s."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from forker import Ended
from ranks import fork_server

#: Below pytest's own timeout, so that a program that hangs is ended here, with what it printed and where it is.
_SECONDS = 100.0


def run_program(
    arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, timeout: float = _SECONDS
) -> Ended:
    """Run `python ARGUMENTS` in a folder; the output has stdout and stderr.

    Args:
        arguments: a script or `-m module`, and what follows; no other option of the interpreter
        folder: the working directory
        env: variables besides those of this process
        timeout: seconds; a program that takes longer is killed, and has no exit code
    """
    # As the test has it by now; the server has what was there when it began.
    variables = {**os.environ, **(env or {})}
    server = fork_server()
    child = server.fork("programs:run_and_leave", variables, arguments=list(arguments), folder=str(folder))
    return server.wait(child, timeout)


def run_and_leave(arguments: Sequence[str], folder: str) -> None:
    """Be the program; and of the interpreter's end what others can see."""
    os.chdir(folder)
    name, *rest = arguments
    code: object = 0
    try:
        if name == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [name, *rest], folder
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
