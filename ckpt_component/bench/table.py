"""The figures of one state as a table, and the claims that they bear out or do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("first_stall", "stall", "staged", "durable", "load")


def render(
    state: str, nbytes: int, rows: Mapping[str, Sequence[Mapping[str, Any]]], limits: Mapping[str, float]
) -> str:
    """The table of one state: medians with (min to max) over the repeats, and durable as a ratio to dcp.save."""
    lines = [f"\n{state}: {nbytes / 1e9:.2f} GB, seconds, median (min - max)"]
    lines.append(f"{'row':<22}" + "".join(f"{column:>24}" for column in COLUMNS) + f"{'x dcp.save':>12}")
    reference = _median(rows.get("dcp.save t1", ()), "durable")
    for name, runs in rows.items():
        good = [run for run in runs if "error" not in run]
        if not good:
            reason = runs[0]["error"] if runs else "not run"
            lines.append(f"{name:<22} FAILED: {reason}")
            continue
        cells = []
        for column in COLUMNS:
            values = sorted(run[column] for run in good)
            cells.append(f"{values[len(values) // 2]:.3f} ({values[0]:.3f} - {values[-1]:.3f})")
        durable = _median(good, "durable")
        ratio = f"{reference / durable:.1f}" if reference and durable else "-"
        lines.append(f"{name:<22}" + "".join(f"{cell:>24}" for cell in cells) + f"{ratio:>12}")
    lines += [
        f"limit {name:<16}{seconds:>18.3f} s  {nbytes / 1e9 / seconds:.2f} GB/s" for name, seconds in limits.items()
    ]
    return "\n".join(lines)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each figure's median over the runs of one row.

    Raises:
        RuntimeError: no run of it succeeded.
    """
    good = [run for run in runs if "error" not in run]
    if not good:
        raise RuntimeError(f"The limits could not be measured: {runs[0]['error'] if runs else 'not run'}.")
    return {name: sorted(run[name] for run in good)[len(good) // 2] for name in good[0]}


def claims(state: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], limits: Mapping[str, float]) -> list[str]:
    """What is promised for a state, with the ratio of this run, and whether it holds."""
    ours, stock = rows.get("async_persistent", ()), rows.get("dcp.save t1", ())
    stall, durable, other = _median(ours, "stall"), _median(ours, "durable"), _median(stock, "durable")
    found = []
    if state == "many_small":
        if durable and other:
            found.append(_claim("async_persistent is durable 10 times faster than dcp.save", other / durable, 10, True))
        if stall:
            found.append(_claim("it stalls at most 2 foreach copies", stall / limits["foreach_copy"], 2, False))
    elif state == "large" and stall:
        found.append(_claim("async_persistent stalls at most 1.3 memcpy", stall / limits["memcpy"], 1.3, False))
    return found


def _claim(text: str, ratio: float, limit: float, at_least: bool) -> str:
    holds = ratio >= limit if at_least else ratio <= limit
    return f"{'holds' if holds else 'DOES NOT HOLD'}: {text} (measured: {ratio:.2f})"


def _median(runs: Sequence[Mapping[str, Any]], column: str) -> float | None:
    values = sorted(run[column] for run in runs if column in run)
    return values[len(values) // 2] if values else None
