"""Does a test notice each small change of the code? Makes one change after the other, and runs the tests that reach it.

In the folder tests:

    python -m mutation.mutate                                    all of `FILES`; takes hours
    python -m mutation.mutate managing core/commit/cleanup.py
    python -m mutation.mutate --changed main                     the files that differ from a branch
    python -m mutation.mutate --among FILE --more 10 saving      those that a file lists, with more tests
    python -m mutation.mutate --tests tests/saving/test_keep.py managing/policies.py
    python -m mutation.mutate --recorded 60                      some of `killers.txt`, as CI does

A mutant that no test notices must be in `survivors.txt`, with the reason why that is right; another survivor, or a line
of that file that no longer applies, is the exit code 1. For a mutant that only few of many tests notice, `killers.txt`
names one to begin with; `--more` adds those that it finds, and `--record` one for each statement. The tests there must
be quick ones, with the same cases for each commit.

`--recorded N` makes N mutants of `killers.txt`, others for each commit, and runs their tests alone, which takes seconds
and not hours. A test that no longer notices its mutant is the exit code 1; so is a line whose mutant has gone from the
code, and `--forget` drops these lines.

It works on copies. A first run of the tests notes which statements each of them reaches, in all its processes. Then a
fork for each mutant puts the changed functions in place of those imported, and runs tests that reach the changed
statement until one fails or enough have passed: a statement that many tests reach gets only some of them. Changes of
what runs when the file is imported (defaults, constants) need a new process.

It needs the cores for itself: the seconds that the tests take decide how many of them a mutant gets.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest

from . import mutants
from .reach import TELLING_SECONDS, Reach

REPOSITORY = Path(__file__).resolve().parents[2]
SURVIVORS, KILLERS = (Path(__file__).with_name(f"{name}.txt") for name in ("survivors", "killers"))
_RESUME = ("optimizer_match", "optimizer_values", "saved_optimizers", "proof")
_LOADING = tuple(f"loading/{name}.py" for name in (*_RESUME, "coalesced"))
FILES = (
    *("core/commit", "core/coordination", "core/writing/orphan_commit.py", "hosts"),
    *("state/parameter_names.py", *_LOADING, "publishing", "managing", "saving"),
)
_OF_PACKAGES = (
    "world",
    "faults",
    "saving",
    "coordination",
    "storage",
    "loading",
    "resume",
    "publishing",
    "recovery",
)
_AROUND = ("process", "stagers", "callers", "events", "config", "cli", "megatron")
TESTS = tuple(f"tests/{name}" for name in (*_OF_PACKAGES, *_AROUND))
#: A test hangs if it takes this many times as long as without a mutant, and so many seconds more.
PATIENCE, GRACE_SECONDS = 8.0, 5.0
#: What a test that is recorded takes at most.
_RECORDED_SECONDS = 2.0
#: Defines the builtin that the calls before statements call, in every process: it notes each number once.
_NOTES = """
import builtins, os
seen = set()
file = os.open(os.environ.get("MUTATION_NOTES", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def reached(number):
    if number not in seen:
        seen.add(number)
        os.write(file, b"%d " % number)
builtins.mutation_reached, builtins.mutation_seen = reached, seen
"""


class Worker:
    """A plugin that sees to one in `workers` of the mutants, in place of running the tests.

    Args:
        root: a copy of the repository for this worker alone
        files: what is mutated
        share: which mutants, and of how many workers: those whose number modulo `share[1]` is `share[0]`
        write: file descriptor for the outcomes, a JSON line each
        options: of the command line

    Attributes:
        marks: options of pytest that select tests
    """

    def __init__(
        self, root: Path, files: Sequence[str], share: tuple[int, int], write: int, options: argparse.Namespace
    ) -> None:
        self._root, self._package, self._files = root, root / "ckpt_component", files
        self._share, self._write = share, write
        self._recorded, self._records = options.recorded, options.record
        self._among = options.recorded or (options.among and options.among.read_text().splitlines())
        self._more, self._killers = options.more, _named(KILLERS)
        self.marks = ["-m", "not soak", "--run-slow"] if options.run_slow else ["-m", "not slow and not soak"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        names = [item.nodeid.partition("[")[0] for item in session.items]
        if self._recorded:
            reach = Reach(dict.fromkeys(range(len(names)), _RECORDED_SECONDS), {}, names)
        else:
            self._look(session)
            reach = self._reach(session)
        usual: Sequence[int]
        tests: Sequence[int]
        turn, noticed = 0, set[tuple[str, int]]()
        for file in self._files:
            place = self._package / file
            original = place.read_text()
            for mutant in mutants.mutants_of(original):
                name = f"{file}: {mutant.name}"
                if self._among is not None and name not in self._among:
                    continue
                if self._records and not self._among and (mutant.line is None or (file, mutant.line) in noticed):
                    continue
                turn += 1
                if turn % self._share[1] != self._share[0]:
                    continue
                place.write_text(ast.unparse(mutant.tree))
                if self._recorded:
                    usual = tests = [number for number, test in enumerate(names) if test == self._killers[name]]
                else:
                    usual, tests = (
                        reach.chosen(file, mutant.line, more, self._killers.get(name)) for more in (1, self._more)
                    )
                with _temporary(self._root):
                    outcome, last = (
                        ("unfit", None) if mutant.line is None else self._settled(session, place, mutant, reach, tests)
                    )
                    if outcome == "unfit":
                        outcome = _outcome_anew(self._root, [session.items[test].nodeid for test in tests])
                if outcome == "failed" and mutant.line is not None:
                    noticed.add((file, mutant.line))
                found = None if last is None else reach.names[last]
                is_known = last is None or last in usual
                os.write(self._write, json.dumps([outcome, name, found, is_known, mutant.line]).encode() + b"\n")
            place.write_text(original)
        return True

    def _look(self, session: pytest.Session) -> None:
        """Run this worker's share of the tests in a fork, with calls before the statements of all files."""
        notes, result, places = self._root / "notes", self._result(self._share[0]), list[tuple[str, int]]()
        originals = {file: (self._package / file).read_text() for file in self._files}
        sources = {}
        for file, text in originals.items():

            def number_of(line: int, file: str = file) -> int:
                places.append((file, line))
                return len(places) - 1

            sources[file] = mutants.with_calls(text, "mutation_reached", number_of)

        def look() -> int:
            _quiet(self._root / "log")
            os.environ["MUTATION_NOTES"] = str(notes)
            exec(_NOTES, {})
            for file, tree in sources.items():
                _replace(self._package / file, tree)
                (self._package / file).write_text(_with_notes(ast.unparse(tree)))
            seen, seconds, failed = dict[str, list[tuple[str, int]]](), dict[str, float](), _Failed()
            session.config.pluginmanager.register(failed)
            for item, ahead in _pairs(session.items[self._share[0] :: self._share[1]]):
                notes.write_bytes(b"")
                sys.modules["builtins"].mutation_seen.clear()
                began = time.monotonic()
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=ahead)
                seconds[item.nodeid] = time.monotonic() - began
                seen[item.nodeid] = sorted({places[int(note)] for note in notes.read_bytes().split()})
            result.with_suffix(".part").write_text(json.dumps([seconds, seen, failed.tests]))
            result.with_suffix(".part").rename(result)
            return 0

        os.waitpid(_fork(look), 0)
        for file, text in originals.items():
            (self._package / file).write_text(text)
        if not result.exists():
            result.write_text("null")

    def _result(self, worker: int) -> Path:
        return self._root.parent / f"reach{worker}.json"

    def _reach(self, session: pytest.Session) -> Reach:
        """Wait for what all workers found."""
        numbers = {item.nodeid: number for number, item in enumerate(session.items)}
        tests, seconds = dict[tuple[str, int], list[int]](), dict[int, float]()
        for result in map(self._result, range(self._share[1])):
            while not result.exists():
                time.sleep(0.1)
            found = json.loads(result.read_text())
            if found is None:
                sys.exit(f"The tests ended early:\n{(self._root / 'log').read_text()[-3000:]}")
            took, seen, failed = found
            seconds |= {numbers[test]: each for test, each in took.items()}
            for test in failed if self._share[0] == 0 else ():
                print(f"left out: {test} fails without a mutant", flush=True)
            for test, places in seen.items():
                for place in places if test not in failed else ():
                    tests.setdefault(tuple(place), []).append(numbers[test])
        if self._share[0] == 0:
            print(f"{len(seconds)} tests, {sum(seconds.values()):.0f} s", flush=True)
        return Reach(seconds, tests, [item.nodeid.partition("[")[0] for item in session.items])

    def _settled(
        self, session: pytest.Session, place: Path, mutant: mutants.Mutant, reach: Reach, tests: Sequence[int]
    ) -> tuple[str, int | None]:
        """The outcome, in which a test counts as failed only if it fails alone: others may have left it something."""
        while True:
            outcome, last = self._outcome(session, place, mutant, reach, tests)
            if (
                outcome != "failed"
                or last is None
                or self._outcome(session, place, mutant, reach, [last])[0] != "passed"
            ):
                return outcome, last
            tests = tests[tests.index(last) + 1 :]

    def _outcome(
        self, session: pytest.Session, place: Path, mutant: mutants.Mutant, reach: Reach, tests: Sequence[int]
    ) -> tuple[str, int | None]:
        """Whether the tests `passed`, `failed`, or `hung`, or the function is `unfit` to be put in place.

        Returns that, and the place of the last test that ran.
        """
        read, write = os.pipe()

        def run() -> int:
            os.setsid()
            _quiet(self._root / "log")
            if not _replace(place, mutant.tree):
                return 2
            session.config.pluginmanager.register(_Failed(at_once=True))
            for number, (item, ahead) in zip(tests, _pairs([session.items[number] for number in tests]), strict=True):
                os.write(write, f"{number} ".encode())
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=ahead)
            return 0

        pid = _fork(run)
        os.close(write)
        limit, ended, last = GRACE_SECONDS, os.pidfd_open(pid), None
        while (ready := select.select([read, ended], [], [], limit)[0]) and (read in ready or ended not in ready):
            if said := os.read(read, 1 << 16).split():
                last = int(said[-1])
                limit = GRACE_SECONDS + PATIENCE * reach.seconds[last]
            elif ended in ready:
                break
        os.close(read)
        os.close(ended)
        if not ready:
            _end(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _end(pid)
        outcome = {0: "passed", 2: "unfit"}.get(code, "failed") if ready else "hung"
        return outcome, None if outcome in ("passed", "unfit") else last


class _Failed:
    """Collects the tests that fail, or ends the process at the first."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.tests, self._at_once = list[str](), at_once

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests.append(report.nodeid)
            if self._at_once:
                os._exit(1)


def _fork(function: Callable[[], int]) -> int:
    """Call a function in a fork; what it returns is the exit code. Returns the process ID."""
    if pid := os.fork():
        return pid
    try:
        os._exit(function())
    except BaseException:
        traceback.print_exc()
        os._exit(3)


def _pairs(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None][: len(items)], strict=True)


def _quiet(log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)


def _with_notes(text: str) -> str:
    """Define the builtin where a process has not run sitecustomize.py."""
    head = "from __future__ import annotations\n"
    return text.replace(
        head, f"{head}import builtins\nif not hasattr(builtins, 'mutation_reached'):\n    exec({_NOTES!r}, {{}})\n", 1
    )


def _replace(path: Path, tree: ast.Module) -> bool:
    """Put a file's functions in place of those imported; returns False if one does not fit."""
    codes = mutants.functions_of(tree, str(path))
    gc.unfreeze()
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == str(path):
            code = function.__code__
            for new in codes.get((code.co_name, code.co_firstlineno), ()):
                if new.co_freevars != code.co_freevars:
                    return False
                function.__code__ = new
    gc.freeze()
    return True


def _outcome_anew(copy: Path, tests: Sequence[str]) -> str:
    """The same in a new process."""
    if not tests:
        return "passed"  # without names, pytest would run all
    names = copy / "names"
    names.write_text("\n".join(tests))
    usual = ["-q", "-x", "-p", "no:cacheprovider", "-n0", "-o", "addopts=--import-mode=importlib", f"@{names}"]
    with open(copy / "log", "w") as log:
        command = [sys.executable, "-m", "pytest", *usual]
        child = subprocess.Popen(command, cwd=copy, stdout=log, stderr=log, start_new_session=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(PATIENCE * (GRACE_SECONDS + TELLING_SECONDS))
    hung = child.poll() is None
    _end(child.pid)
    return "hung" if hung else "failed" if child.wait() else "passed"


def _end(leader: int) -> None:
    """Kill a process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@contextlib.contextmanager
def _temporary(root: Path) -> Iterator[None]:
    """Let pytest make its temporary folders in a new one."""
    folder = tempfile.mkdtemp(dir=root)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a process that is not killed yet may write there


def main() -> int:
    """Mutate the files that were asked for. Returns 1 if a survivor is not accepted, or an accepted one has gone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--changed", metavar="BRANCH")
    parser.add_argument(
        "--tests", action="append", metavar="PATH", help="these alone, such as a new one; may be repeated"
    )
    parser.add_argument(
        "--among", type=Path, metavar="FILE", help="only mutants that it has as lines, such as survivors"
    )
    parser.add_argument("--run-slow", action="store_true", help="with the slow tests")
    parser.add_argument("--recorded", type=int, default=0, metavar="N", help="N mutants of killers.txt and their tests")
    parser.add_argument("--forget", action="store_true", help="with that, drop the lines whose mutants have gone")
    parser.add_argument(
        "--record", action="store_true", help="note a test that notices one for each statement, and make no more"
    )
    parser.add_argument("--more", type=int, default=1, metavar="N", help="spend N times as long on each mutant")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options, package = parser.parse_args(), REPOSITORY / "ckpt_component"
    files = [
        str(path.relative_to(package))
        for name in options.files
        for path in sorted([package / name] if name.endswith(".py") else (package / name).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    if options.changed:
        command = ["git", "-C", str(package), "diff", "--name-only", "--relative", options.changed, "--", "."]
        changed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        files = [file for file in files if file in changed]
    accepted, stale = _named(SURVIVORS), False
    if options.recorded:
        stale = _has_stale(package, forget=options.forget)
        options.recorded = _in_turn(_named(KILLERS), options.recorded)
        files = sorted({name.partition(":")[0] for name in options.recorded})
        options.tests, accepted = sorted({*options.recorded.values()}), {}
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        read, write = os.pipe()
        for number in range(options.workers):
            root = _copy(Path(folder).resolve() / str(number))
            _fork(
                partial(
                    _work, root, Worker(root, files, (number, options.workers), write, options), options.tests or TESTS
                )
            )
        os.close(write)
        alive, counts, recorded = list[str](), Counter[str](), set[tuple[str, int]]()
        with open(read) as lines:
            for outcome, name, found, is_known, line in map(json.loads, lines):
                counts[outcome] += 1
                statement = name.partition(":")[0], line
                is_first = options.record and outcome == "failed" and line is not None and statement not in recorded
                if found is not None and (is_first or (options.more > 1 and not is_known)):
                    recorded.add(statement)
                    _note({**_named(KILLERS), name: found})
                if outcome == "passed":
                    alive.append(name)
                    by = f" (by {options.recorded[name]})" if options.recorded else ""
                    print("accepted" if name in accepted else "SURVIVED", name + by, flush=True)
                elif outcome == "hung":  # counts as noticed, but a test that fails says more
                    print("hung    ", name, flush=True)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(options.workers)]
    new = [name for name in alive if name not in accepted]
    all_run = not (options.among or options.tests or options.recorded)
    gone = [name for name in accepted if all_run and name.partition(":")[0] in files and name not in alive]
    print(*(f"gone from the code, or killed: {name}" for name in gone), sep="\n")
    print(f"{counts.total()} mutants of {len(files)} files: {dict(counts)}; {len(new)} survivors are not accepted")
    return max(codes) or bool(new or gone or stale)


def _in_turn(killers: Mapping[str, str], count: int) -> dict[str, str]:
    """So many of the mutants, others for each commit."""
    sys.path.append(str(REPOSITORY / "tests/support"))
    from strides import STRIDE_OFFSET

    stride = -(-len(killers) // count)
    return dict([*killers.items()][STRIDE_OFFSET % stride :: stride])


def _has_stale(package: Path, *, forget: bool) -> bool:
    """Whether mutants of `killers.txt`, or their tests, have gone, and are not forgotten."""
    killers, names = _named(KILLERS), set[str]()
    for file in {name.partition(":")[0] for name in killers}:
        if (package / file).exists():
            names |= {f"{file}: {mutant.name}" for mutant in mutants.mutants_of((package / file).read_text())}
    gone = {name: "the code" for name in killers.keys() - names}
    for name, test in killers.items():
        file, _, function = test.partition("::")
        place = REPOSITORY / file
        if not place.exists() or f"def {function.rpartition('::')[2]}(" not in place.read_text():
            gone[name] = f"the tests, with {test}"
    if gone and forget:
        _note({name: test for name, test in killers.items() if name not in gone})
    for name, where in sorted(gone.items()):
        print("forgotten:" if forget else f"gone from {where} (--forget drops its line):", name)
    return bool(gone) and not forget


def _named(file: Path) -> dict[str, str]:
    """What a file says of mutants, by their names."""
    lines = (line.partition("  # ") for line in file.read_text().splitlines() if line and line[0] != "#")
    return {name: said for name, _, said in lines}


def _note(killers: Mapping[str, str]) -> None:
    head = KILLERS.read_text().partition("\n")[0]
    KILLERS.write_text("\n".join([head, *(f"{name}  # {killers[name]}" for name in sorted(killers))]) + "\n")


def _copy(root: Path) -> Path:
    root.mkdir()
    for name in ("ckpt_component", "tests", "conf", "recipes", "docs", "pyproject.toml"):
        place = REPOSITORY / name
        if place.is_dir():
            shutil.copytree(place, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, root / name)
    (root / "sitecustomize.py").write_text(f"exec({_NOTES!r}, {{}})\n")
    return root


def _work(root: Path, worker: Worker, tests: Sequence[str]) -> int:
    os.chdir(root)
    sys.dont_write_bytecode = True
    os.environ.update(
        PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=f"{root}{os.pathsep}{root}/tests{os.pathsep}{root}/tests/support"
    )
    sys.path[:0] = [str(root), f"{root}/tests", f"{root}/tests/support"]
    usual = [
        "-q",
        "-s",
        "-p",
        "no:faulthandler",
        "-p",
        "no:cacheprovider",
        "-n0",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    return int(pytest.main([*usual, *worker.marks, *tests], plugins=[worker]))


if __name__ == "__main__":
    sys.exit(main())
