"""Every effect on the file system goes through `Storage`, so that it can be made to fail; every wait has a deadline."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent

#: Calls that write, rename or delete, by the name of the function or method.
EFFECTS = {
    "os": {
        *("rename", "renames", "replace", "unlink", "remove", "rmdir", "removedirs", "mkdir", "makedirs", "link"),
        *("symlink", "mkfifo", "mknod", "truncate", "ftruncate", "write", "writev", "pwrite", "pwritev", "fsync"),
        *("fdatasync", "open", "posix_fallocate", "sendfile", "copy_file_range"),
    },
    "shutil": {"*"},
    "tempfile": {"*"},
}
#: Methods of `pathlib.Path` that no other object here has.
PATH_METHODS = {"write_text", "write_bytes", "touch", "rmdir", "symlink_to", "hardlink_to", "rename", "unlink", "mkdir"}

#: Where such calls are all the same, and why.
EXCEPTIONS = {
    "core/storage/files.py": "it is FileStorage",
    "core/storage/bucket.py": "it is ObjectStorage",
    "core/storage/bucket_store.py": "it is what storages of objects have in common",
    "hosts/host_memory.py": "it is HostMemory",
    "hosts/wire.py": "sockets, and their folders",
    "core/storage/failpoint_fs.py": "the log in which the tests count operations; unset in production",
    "core/pages.py": "memory (memfd), no file",
    "core/sockets.py": "sends bytes over a socket",
    "core/outside.py": "/dev/null, for the output of a process; a setting of the kernel for one",
    "compat/host_image.py": "memory (memfd), no file",
    "core/storage/safe_open.py": "opens for reading",
    "core/storage/tree_removal.py": "opens folders, and deletes by FileStorage",
    "publishing/receiver.py": "a private temporary folder, deleted at the end",
    "managing/stop_signals.py": "a line on stderr from a signal handler",
    "integrations/file_capture.py": "small files of a framework in a private temporary folder, read back at once",
    "compat/spawn.py": "tracebacks of a user's processes in a private temporary folder, as torch's spawn has it",
}
#: Methods that wait as long as it takes, unless they are given a time.
WAITS = {"wait", "result", "exception", "join", "acquire", "shutdown"}
#: Whose methods of these names have deadlines of their own: checkpointers, managers, and the claim to a folder.
BOUNDED = (
    "self",
    "saver",
    "checkpointer",
    "_manager",
    "self._pipeline",
    "ownership",
    "FencingToken(fs, root.path, names)",
)
#: Where such calls are all the same, and why.
WITHOUT_DEADLINE = {
    "compat/checkpoint_process.py": "the parent kills the process at the deadline; and a future that is done",
    "compat/spawn.py": "torch's spawn waits for its processes",
    "core/outside.py": "a lock that was just made",
    "core/image/copy.py": "copies of memory, which do not block",
    "core/pages.py": "about a millisecond",
    "core/storage/bucket_set.py": "requests have the deadlines of the store's client",
    "core/writing/range_writer.py": "memory is read, and summed, by threads of the same process",
    "publishing/fetched.py": "requests have the deadlines of the store's client; memory is changed by this process",
    "saving/pipeline.py": "a future that is done",
}
#: Packages that no checkpoint of a user's passes through: the commands write result files, reports and recipes, and what
#: is simulated is no file.
PACKAGES_BESIDE = {"cli", "testing"}


def effects_of(path: Path) -> Iterator[str]:
    """The calls in a module that write, rename or delete; `fs.`, `ops.` and `storage.` are a `Storage`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        call = node.func
        if isinstance(call, ast.Name) and call.id == "open":
            mode = next((word.value for word in node.keywords if word.arg == "mode"), None)
            mode = mode or (node.args[1] if len(node.args) > 1 else None)
            if mode is not None and not (isinstance(mode, ast.Constant) and set(str(mode.value)) <= {"r", "b", "t"}):
                yield f"open() at line {node.lineno}"
        elif isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id in EFFECTS:
            if EFFECTS[call.value.id] & {call.attr, "*"}:
                yield f"{call.value.id}.{call.attr}() at line {node.lineno}"
        elif isinstance(call, ast.Attribute) and call.attr in PATH_METHODS:
            owner = ast.unparse(call.value)
            if owner.split(".")[-1] not in ("fs", "_fs", "ops", "storage", "_storage", "super()"):
                yield f"{owner}.{call.attr}() at line {node.lineno}"


def test_effects_on_files_go_through_fs_ops() -> None:
    found = {
        str(path.relative_to(PACKAGE)): calls
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in PACKAGES_BESIDE and (calls := list(effects_of(path)))
    }
    assert {name: calls for name, calls in found.items() if name not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() <= found.keys(), "an exception that is not needed any more"


def waits_of(path: Path) -> Iterator[str]:
    """Calls in a module that wait for another thread, process or future, and have no deadline."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, values = ast.unparse(node.func.value), [ast.unparse(each) for each in node.args]
        if node.func.attr in WAITS and not (values or node.keywords or owner.endswith(BOUNDED)):
            yield f"{owner}.{node.func.attr}()"
        elif node.func.attr == "wait_for" and values[1:] == ["None"]:
            yield ast.unparse(node)


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    found = {
        str(path.relative_to(PACKAGE)): calls
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "testing" and (calls := list(waits_of(path)))
    }
    assert {name: calls for name, calls in found.items() if name not in WITHOUT_DEADLINE} == {}
    assert WITHOUT_DEADLINE.keys() <= found.keys(), "a reason that is not needed any more"


def test_coordination_and_commit_take_time_and_threads_from_a_clock() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for package in ("core/coordination", "core/commit")
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        if name in ("time", "threading", "queue", "sched", "asyncio", "concurrent.futures")
    }
    assert not found


def test_the_lint_sees_what_it_forbids(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import os\nopen('x', 'w')\nos.rename('a', 'b')\nPath('x').write_text('y')\nopen('x')\nfs.unlink('x')"
    )
    assert len(list(effects_of(bad))) == 3
    bad.write_text("done.wait()\ndone.wait(1)\nfuture.result()\nself._manager.wait()\nfuture.result(timeout=1)")
    assert [*waits_of(bad)] == ["done.wait()", "future.result()"]
    bad.write_text("outside.wait_for([future], 5)\noutside.wait_for([future], None)")
    assert [*waits_of(bad)] == ["outside.wait_for([future], None)"]
