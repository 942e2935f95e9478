"""`ckpt-bench`, the same as `python -m ckpt_bench`: the benchmark as a Hydra app.

torch is imported only in the processes of the rows.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig

from ckpt_component.cli.output import counted
from ckpt_component.cli.reports.result import RUNNING, write_job_result
from ckpt_component.config.hydra.hydra_errors import HydraConfigError
from ckpt_component.config.hydra.hydra_job import run_app
from ckpt_component.core.spelling import closest
from ckpt_component.errors import CheckpointError

from .child import Run
from .device import device_name, require_cuda
from .experiments import EXPERIMENTS
from .peer_environment import PeerEnvironment
from .place import place
from .presentation import Presentation
from .promises import judge
from .row_figures import read_figures, rows_for_sweep, write_figures
from .row_page import rows_shown
from .row_table import render
from .runs import Case, Runner, duration
from .schema import STATES, Action, Bench, BenchRequest, Device, read, register
from .time_budget import TimeBudget

#: Accepted as the first word of the command line, for `action=`.
_ACTIONS = tuple(action.value for action in Action)
_MULTIRUN = ("-m", "--multirun")


class BenchmarkFailed(CompactHydraException, CheckpointError):
    """A promise failed, nothing was measured, or a peer is missing. Hydra prints the text without a traceback."""


def main() -> None:
    """Run the command line."""
    # Exit normally on SIGTERM, so that files on the target are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    register()
    sys.argv[1:] = arguments(sys.argv[1:])
    run_app("bench", run_job, [item.name for item in fields(Bench)])


def arguments(typed: list[str]) -> list[str]:
    """Translate the command line for Hydra: `check` becomes `action=check`, and lists get brackets outside a sweep.

    In a sweep, `state=large,many_small` is one job per state; otherwise it is a single run of both.

    Raises:
        SystemExit: with what to type instead, for an unknown action, and for presets and recipes, which are rows here
    """
    if typed and re.fullmatch(r"\w+", typed[0]):
        if typed[0] not in _ACTIONS:
            near = closest(typed[0], _ACTIONS)
            hint = f"did you mean ckpt-bench {near}?" if near else f"its actions are {', '.join(_ACTIONS)}."
            sys.exit(f"ckpt-bench has no action '{typed[0]}'; {hint}")
        typed = [f"action={typed[0]}", *typed[1:]]
    for before, word in zip(["", *typed], typed, strict=False):
        if re.fullmatch(r"\w+", word) and (not before.startswith("-") or before in _MULTIRUN):
            sys.exit(f"ckpt-bench takes KEY=VALUE after its action, such as rows=sync, and not '{word}'.")
        if re.match(r"\+{0,2}(checkpoint|recipe)[=./]", word):
            sys.exit(
                f"ckpt-bench does not take {word}: it measures presets, as rows=[async_persistent,sync]. Settings are "
                "swept by ckpt-train -m, and chosen by ckpt tune."
            )
    if any(option in typed for option in _MULTIRUN):
        return typed
    return [re.sub(r"^(state|target|rows|items|ranks)=(\w+(?:,\w+)+)$", r"\1=[\2]", argument) for argument in typed]


def run_job(config: DictConfig) -> None:
    """Run the action of the config, and write `result.json` to the output folder.

    Raises:
        CheckpointConfigError: a value is invalid
        BenchmarkFailed: a promise failed, no row was measured, or a peer could not be installed
        SystemExit: a signal stopped the run
    """
    job = _JobResult()
    try:
        request = read(config)
        here, folder = Path(HydraConfig.get().runtime.cwd), Path(HydraConfig.get().runtime.output_dir)
        peers = PeerEnvironment(str(here / request.bench.peers_dir))
        if request.bench.action is Action.peers:
            _make_peers(peers)
            return
        if request.bench.device is Device.cuda and request.bench.results is None:
            require_cuda()
        if request.bench.action in EXPERIMENTS:
            _experiment(request, peers, here, folder)
        else:
            _measure_rows(request, peers, here, folder, job)
    except KeyboardInterrupt:
        job.write("stopped", "by Ctrl-C")
        raise
    except SystemExit as leaving:
        job.write("stopped", f"with exit code {leaving.code}")
        raise
    except Exception as error:
        job.write("failed", str(error) or type(error).__name__)
        raise
    job.write("completed")


class _JobResult:
    """Writes `result.json` with the figures so far, so that the report of a killed run shows them."""

    def __init__(self) -> None:
        self.cases = list[Case]()

    def write(self, status: str, reason: str | None = None) -> None:
        write_job_result(status, reason=reason, rows=rows_for_sweep(self.cases))


def _make_peers(peers: PeerEnvironment) -> None:
    try:
        failed = peers.make(_say)
    except RuntimeError as error:
        raise BenchmarkFailed(str(error)) from error
    if failed:
        raise BenchmarkFailed(f"Not installed, and so not measured: {'; '.join(failed)}.")
    _say("all peers are installed; ckpt-bench measures them now")


def _measure_rows(request: BenchRequest, peers: PeerEnvironment, here: Path, folder: Path, job: _JobResult) -> None:
    bench = request.bench
    if bench.results is not None:
        job.cases, about = read_figures(str(here / bench.results))
        write_figures(job.cases, folder, about)
    else:
        about = _about(request, peers)
        _measure(request, peers, here, folder, about, job)
    checked = bench.action is Action.check
    verdicts = judge(job.cases, cores=about["cores"], loop_threads=about["loop_threads"]) if checked else []
    shown = rows_shown(job.cases, verdicts)
    shown.show(about, folder, _say, with_tables=bench.results is not None)
    if shown.failed:
        raise BenchmarkFailed(f"{counted(shown.failed, 'promise')} failed; see FAIL above.")
    if shown.draw is None:
        raise BenchmarkFailed("No row was measured; the reasons are above.")


def _measure(
    request: BenchRequest, peers: PeerEnvironment, here: Path, folder: Path, about: dict[str, Any], job: _JobResult
) -> None:
    bench, cases = request.bench, job.cases

    def keep(_row: str = "", _run: Run | None = None) -> None:
        write_figures(cases, folder, about)
        job.write(RUNNING)

    keep()
    runner = Runner(
        peers=peers,
        settings={
            "saves": bench.saves,
            "enough_seconds": bench.enough_seconds,
            "loop_threads": bench.loop_threads,
            "step_seconds": bench.step_seconds,
            "tail_seconds": bench.tail_seconds,
            "pairs": bench.pairs,
            "device": bench.device.value,
        },
        repeats=bench.repeats,
        timeout=bench.row_timeout,
        logs=folder,
        say=_say,
    )
    pairs = [(target, state) for target in request.targets for state in request.states]
    count = len(pairs) * (len(request.rows) + 1) * bench.repeats
    within = "" if bench.budget is None else f", in at most {duration(bench.budget)} (budget)"
    _say(
        f"{count} measurements at most, in a process each{within}; from the second on, lines tell how long a table "
        "still takes"
    )
    budget = TimeBudget(bench.budget)
    for left, (target, state) in zip(range(len(pairs), 0, -1), pairs, strict=True):
        parent, key = _parent(bench, target, here)
        with place(parent, f"{key}=") as base:
            _refuse_full(state, base, key)
            cases.append(Case(state, target))
            try:
                # Figures are written after every process, so that a stopped run keeps them.
                runner.measure(cases[-1], request.rows, base, keep, budget.part(left))
                keep()
            finally:  # a run that is stopped shows what it has
                print(render(cases[-1]), flush=True)


def _experiment(request: BenchRequest, peers: PeerEnvironment, here: Path, folder: Path) -> None:
    bench, experiment = request.bench, EXPERIMENTS[request.bench.action]
    if bench.device is not Device.cpu:
        raise HydraConfigError(f"device={bench.device.value}: {experiment.cpu_alone}; use device=cpu.")
    if experiment.one_state and (len(request.states) > 1 or len(request.targets) > 1):
        raise HydraConfigError(f"ckpt-bench {bench.action.value} takes one state= and one target=; use -m for several.")
    if bench.results is not None:
        measured, about = experiment.read(str(here / bench.results))
        experiment.write(measured, folder, about)
    else:
        about = _about(request, peers)
        measured = experiment.measure(request, _parent(bench, request.targets[0], here), about, folder, _say)
    _present(experiment.shown(measured), about, folder, *experiment.failure)


def _present(shown: Presentation, about: Mapping[str, Any], folder: Path, failed: str, one: str) -> None:
    """Show what was measured; raises BenchmarkFailed if not all of it is as it must be, or there is nothing."""
    shown.show(about, folder, _say)
    if shown.failed:
        raise BenchmarkFailed(f"{failed.format(counted(shown.failed, one))}; see FAIL above.")
    if shown.draw is None:
        raise BenchmarkFailed("Nothing was measured; the reasons are above.")


def _parent(bench: Bench, target: str, here: Path) -> tuple[Path, str]:
    """The parent of the run's folder, and the key that sets it."""
    disk = here / bench.dir, "dir"
    return disk if target == "disk" else (Path(bench.tmpfs_dir), "tmpfs_dir")


#: The most copies of a state that exist on disk at once, with a margin.
_COPIES = 3


def _refuse_full(state: str, base: str, key: str) -> None:
    free, needed = shutil.disk_usage(base).free / 1e9, _COPIES * STATES[state]
    if free < needed:
        raise HydraConfigError(
            f"{os.path.dirname(base)} has {free:.1f} GB free, and state={state} needs {needed:.1f}; "
            f"give another {key}=."
        )


def _about(request: BenchRequest, peers: PeerEnvironment) -> dict[str, Any]:
    """Machine, versions and settings, to interpret the figures."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "unknown"
    keys = ("budget", "repeats", "saves", "loop_threads", "step_seconds", "tail_seconds", "pairs")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch,
        **({"device": device_name()} if request.bench.device is Device.cuda else {}),
        **peers.versions(),
        **{key: value for key, value in asdict(request.bench).items() if key in keys},
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
