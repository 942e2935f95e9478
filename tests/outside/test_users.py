"""Who has to do with what is outside of the process by other ways than the `Outside`, and why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent

#: What people and tests call, and so what a simulated run does not pass through.
FACES = ("cli", "integrations", "megatron", "testing")
#: Modules of the standard library that wait, run something beside the caller, reach another process, or are random.
FORBIDDEN = {
    *("time", "threading", "_thread", "concurrent", "queue", "sched", "asyncio"),
    *("socket", "socketserver", "select", "selectors", "subprocess", "multiprocessing", "secrets"),
}
#: But for measuring.
MEASURES = {"perf_counter"}
#: The classes and functions that start threads.
STARTS_THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread"}

#: These are the `Outside`.
IMPLEMENT = {
    "core/outside.py": "time, threads, processes and random bytes",
    "core/sockets.py": "connections",
}
#: Others that need it, and why; at most twelve.
MAY = {
    "compat/spawn.py": "a user's function runs in processes of multiprocessing, as torch.multiprocessing.spawn has it",
    "compat/file_system_writer_async.py": "results come from a `queue.Queue`, as those of NVRx do",
}


def below_the_faces() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] not in FACES:
            yield str(name), ast.parse(path.read_text())


def uses_of(tree: ast.Module) -> Iterator[str]:
    """What a module uses of the outside by itself, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names, module = {alias.name for alias in node.names}, str(node.module)
            if module.partition(".")[0] in FORBIDDEN and not (module == "time" and names <= MEASURES):
                yield f"{module}: {', '.join(sorted(names))}"
            elif module == "os" and "urandom" in names:
                yield "os.urandom"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "os.urandom":
            yield "os.urandom"


def starts_of(tree: ast.Module) -> Iterator[str]:
    """The calls of a module that make threads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTS_THREADS:
            yield ast.unparse(node.func)


def test_the_package_takes_time_threads_and_connections_from_an_outside() -> None:
    found = {name: uses for name, tree in below_the_faces() if (uses := sorted({*uses_of(tree)}))}
    assert {name: uses for name, uses in found.items() if name not in {*IMPLEMENT, *MAY}} == {}
    assert {*IMPLEMENT, *MAY} <= found.keys(), "an exception that is not needed any more"
    assert len(MAY) <= 12


def test_one_class_starts_threads() -> None:
    found = {name: starts for name, tree in below_the_faces() if (starts := {*starts_of(tree)})}
    assert found == {"core/outside.py": {"threading.Thread", "ThreadPoolExecutor"}}


#: What only one class does, by the calls that do it -> where they are.
ONCE = {
    "Popen": {"core/outside.py"},
    # The contract of torch.multiprocessing.spawn, for a user's functions.
    "Process": {"compat/spawn.py"},
    # Frames; and the handshake that tells whether there will be any.
    "sendall": {"core/processes/framing.py", "hosts/wire.py"},
    "send_descriptors": {"core/processes/framing.py"},
    "send_file": {"core/processes/framing.py", "hosts/server.py"},
    "answer_requests": {
        *("background/jobs.py", "compat/worker_main.py"),
        *("hosts/server.py", "core/writing/worker.py"),
    },
}


def calls_of(tree: ast.Module) -> Iterator[str]:
    """The last names of what a module calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "psutil" not in ast.unparse(node.func):
            yield ast.unparse(node.func).rpartition(".")[2]


def test_one_class_starts_processes_and_one_sends_frames() -> None:
    found = dict[str, set[str]]()
    for name, tree in below_the_faces():
        for call in ONCE.keys() & {*calls_of(tree)}:
            found.setdefault(call, set()).add(name)
    assert found == ONCE


def test_what_is_forbidden_is_seen() -> None:
    code = (
        "import time, os.path\nfrom time import sleep, perf_counter\nfrom concurrent.futures import wait\nos.urandom(4)"
    )
    assert [*uses_of(ast.parse(code))] == [
        "time",
        "time: perf_counter, sleep",
        "concurrent.futures: wait",
        "os.urandom",
    ]
    code = "def f():\n    from os import urandom\nfrom time import perf_counter\nfrom .socket import x\nimport multiprocessing.util"
    assert {*uses_of(ast.parse(code))} == {"os.urandom", "multiprocessing.util"}
    code = "threading.Thread(target=f).start()\nThread()\nclass Thread: ..."
    assert {*starts_of(ast.parse(code))} == {"threading.Thread", "Thread"}
