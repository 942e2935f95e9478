"""Does a test notice each small change of the code? Mutates one file after the other, and runs the tests of its room.

    python tests/mutation/mutate.py                          all files of `ROOMS`; takes hours
    python tests/mutation/mutate.py core/commit/retention.py
    python tests/mutation/mutate.py --changed main           the files that differ from a branch

It works on a copy. A mutant that no test notices must be in `survivors.txt`, with the reason why that is right; another
survivor, or a line of that file that no longer applies, is the exit code 1. Torch is imported once, and a process forked
for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SURVIVORS = Path(__file__).with_name("survivors.txt")
#: By room: the tests that a change of it must make fail, those that fail most often first.
ROOMS = {
    "core/commit": (
        *("tests/saving/test_keep.py", "tests/simulation/test_protocols.py", "tests/storage/test_commit.py"),
        *("tests/storage/test_copying.py", "tests/simulation", "tests/saving/test_resume_scan.py"),
    ),
    "core/coordination": (
        *(
            "tests/simulation/test_calls.py",
            "tests/simulation/test_decisions.py",
            "tests/simulation/test_heartbeats.py",
        ),
        *("tests/coordination", "tests/simulation/test_ranks.py", "tests/saving/test_alone.py"),
        "tests/saving/test_world.py",
    ),
    "managing": ("tests/saving", "tests/simulation"),
    "saving": ("tests/saving", "tests/simulation"),
}
#: A run of tests hangs if it takes this many times as long as without a mutant.
PATIENCE = 5
_SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add},
}


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is replaced by."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare) and type(changed.ops[0]) in _SWAPS:
        changed.ops[0] = _SWAPS[type(changed.ops[0])]()
        yield changed
    elif isinstance(changed, ast.BoolOp | ast.BinOp) and type(changed.op) in _SWAPS:
        changed.op = _SWAPS[type(changed.op)]()
        yield changed
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield changed.operand
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, int):
        changed.value = not changed.value if isinstance(changed.value, bool) else changed.value + 1
        yield changed
    elif isinstance(changed, ast.If | ast.IfExp) and not isinstance(changed.test, ast.Compare | ast.UnaryOp):
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(changed, ast.Raise) or (isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call)):
        yield ast.Pass()
    elif isinstance(changed, ast.Return) and not (changed.value is None or _is_none(changed.value)):
        yield ast.Return(ast.Constant(None))
    elif isinstance(changed, ast.Continue):
        yield ast.Break()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_beside(node: ast.AST) -> bool:
    """Whether no test is to notice: logs, texts, annotations, and names of the module."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    text = ast.unparse(node) if isinstance(node, ast.Expr | ast.If) else ""
    return text.startswith(("logger.", "if TYPE_CHECKING")) or isinstance(
        node, ast.JoinedStr | ast.Import | ast.ImportFrom
    )


def mutants_of(source: str) -> Iterator[tuple[str, str]]:
    """Each mutant's name, which does not depend on line numbers, and its source."""
    tree, seen = ast.parse(source), Counter[str]()

    def visit(parent: ast.AST, place: str) -> Iterator[tuple[str, str]]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "exc", "type_params"):
                continue
            items = value if isinstance(value, list) else [value]
            for number, node in enumerate(items):
                if not isinstance(node, ast.AST) or _is_beside(node):
                    continue
                for change in _changes(node):
                    name = f"{place}: {_short(node)} -> {_short(change)}"
                    seen[name] += 1
                    put(parent, field, value, number, change)
                    yield name + f" #{seen[name]}" * (seen[name] > 1), ast.unparse(ast.fix_missing_locations(tree))
                    put(parent, field, value, number, node)
                within = place
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    within = f"{place}.{node.name}".lstrip(".")
                yield from visit(node, within)

    def put(parent: ast.AST, field: str, value: object, number: int, node: ast.AST) -> None:
        if isinstance(value, list):
            value[number] = node
        else:
            setattr(parent, field, node)

    yield from visit(tree, "")


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:70]


def _outcome(tests: tuple[str, ...], log: str, seconds: float) -> str:
    """Run tests in a fork, which imports the package anew; returns `passed`, `failed` or `hung`."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        import pytest

        usual = ["-q", "-x", "-p", "no:cacheprovider", "-n0", "-m", "not slow and not soak"]
        os._exit(pytest.main([*usual, "-o", "addopts=--import-mode=importlib", "-o", "timeout=60", *tests]))
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if ended == (0, 0):
        os.waitpid(pid, 0)
        return "hung"
    return "failed" if ended[1] else "passed"


def survivors_in(package: Path, file: str, accepted: set[str]) -> list[str]:
    """The mutants of a file of the copy that no test notices."""
    path, tests = package / file, next(tests for room, tests in ROOMS.items() if file.startswith(f"{room}/"))
    source, alive, count, log = path.read_text(), list[str](), 0, str(package.parent / "log")
    began = time.monotonic()
    if _outcome(tests, log, 3600) != "passed":
        sys.exit(f"The tests of {file} fail without a mutant:\n{Path(log).read_text()[-3000:]}")
    limit = PATIENCE * (time.monotonic() - began)
    for name, mutant in mutants_of(source):
        count += 1
        path.write_text(mutant)
        outcome = _outcome(tests, log, limit)
        if outcome == "hung":  # counts as noticed, but a test that fails says more
            print(f"hung      {file}: {name}", flush=True)
        if outcome == "passed":
            alive.append(f"{file}: {name}")
            print(f"{'accepted' if alive[-1] in accepted else 'SURVIVED'}  {alive[-1]}", flush=True)
    path.write_text(source)
    print(f"{file}: {count} mutants, {len(alive)} survived", flush=True)
    return alive


def main() -> int:
    """Mutate the files that were asked for. Returns 1 if a survivor is not accepted, or an accepted one has gone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--changed", metavar="BRANCH")
    options, package = parser.parse_args(), REPOSITORY / "ckpt_component"
    files = options.files or [
        str(path.relative_to(package))
        for room in ROOMS
        for path in sorted((package / room).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    if options.changed:
        command = ["git", "-C", str(package), "diff", "--name-only", "--relative", options.changed, "--", "."]
        changed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        files = [file for file in files if file in changed]
    accepted = {line.partition("  # ")[0] for line in SURVIVORS.read_text().splitlines() if line and line[0] != "#"}
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for name in ("ckpt_component", "tests", "conf", "recipes", "docs", "pyproject.toml"):
            place = REPOSITORY / name
            if place.is_dir():
                shutil.copytree(place, Path(folder) / name, ignore=ignored)
            else:
                shutil.copy(place, Path(folder) / name)
        os.chdir(folder)
        sys.dont_write_bytecode = True
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=f"{folder}{os.pathsep}{folder}/tests")
        sys.path[:0] = [folder, f"{folder}/tests"]
        import torch

        torch.set_num_threads(1)
        alive = [name for file in files for name in survivors_in(Path(folder) / "ckpt_component", file, accepted)]
    new = [name for name in alive if name not in accepted]
    gone = [name for name in accepted if name.partition(":")[0] in files and name not in alive]
    print(*(f"gone from the code, or killed: {name}" for name in gone), sep="\n")
    return bool(new or gone)


if __name__ == "__main__":
    sys.exit(main())
