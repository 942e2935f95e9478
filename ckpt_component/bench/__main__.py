"""`python -m ckpt_component.bench`: every row in a fresh process, repeats interleaved, ratios of the same run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from .limits import measure_limits
from .rows import ROWS, STEADY, measure
from .states import STATES, bytes_of, make_state
from .table import claims, medians, render

_ROW_SECONDS = 900
#: The hardware's own speed is measured as a row among the others.
_LIMITS = "limits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ckpt_component.bench", description=__doc__)
    parser.add_argument("--state", nargs="+", default=["many_small", "large"], choices=STATES)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per row")
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure")
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--one", nargs=3, metavar=("ROW", "STATE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        row, state_name, folder = options.one
        state = make_state(state_name)
        found = measure_limits(state, folder, STEADY) if row == _LIMITS else measure(row, state, folder)
        print(json.dumps(found))
        return 0
    folder = tempfile.mkdtemp(prefix="ckpt-bench-", dir=options.dir)
    try:
        results = {state: _run_state(state, options.rows, options.repeats, folder) for state in options.state}
    finally:
        shutil.rmtree(folder)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as stream:
            json.dump(results, stream, indent=1)
    return 0


def _run_state(name: str, rows: Sequence[str], repeats: int, folder: str) -> dict[str, Any]:
    nbytes = bytes_of(make_state(name))
    free = shutil.disk_usage(folder).free
    if free < 3 * nbytes:
        raise SystemExit(
            f"{folder} has {free / 1e9:.1f} GB free, and {name} needs {3 * nbytes / 1e9:.1f} GB; use --dir."
        )
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in (_LIMITS, *rows)}
    for repeat in range(repeats):
        for row in found:
            _say(f"{name}: {row}, repeat {repeat + 1} of {repeats}")
            found[row].append(_run_row(row, name, folder))
    limits = medians(found.pop(_LIMITS))
    print(render(name, nbytes, found, limits))
    made = claims(name, found, limits)
    print("\n".join(made))
    return {"bytes": nbytes, "limits": limits, "rows": found, "claims": made}


def _run_row(row: str, state: str, folder: str) -> dict[str, Any]:
    place = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-W", "ignore", "-m", "ckpt_component.bench", "--one", row, state, place]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_ROW_SECONDS,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {_ROW_SECONDS} s"}
    finally:
        shutil.rmtree(place)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
