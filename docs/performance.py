"""The tables of figures in docs/performance.md, from docs/pictures.json: `python docs/performance.py` writes them.

`python docs/pictures.py measure BENCH` takes the figures from a run of `ckpt-bench`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().with_name("performance.md")
NUMBERS = PAGE.with_name("pictures.json")
#: Figures of `ckpt-bench` and the heads of their columns.
_COLUMNS = {
    "stall": "the call",
    "staged": "copied",
    "durable": "durable",
    "lost": "training lost",
    "load_warm": "warm load",
    "load_cold": "cold load",
}
_ROWS = {
    "limits": "*raw machine*",
    "async_persistent": "`async_persistent`",
    "async_persistent_fast": "`async_persistent`, isal",
    "async_zero_overhead": "`async_zero_overhead`",
    "async_zero_overhead_fast": "`async_zero_overhead`, isal",
    "sync": "`sync`",
    "torch_checkpointing": "Meta's `torch_checkpointing`",
    "torch_save": "`torch.save`",
    "dcp_save_t1": "`dcp.save`",
    "nvrx_persistent_clone": "[NVRx](https://github.com/NVIDIA/nvidia-resiliency-ext) persistent",
    "nvrx_temporal": "NVRx temporal",
}
_STATES = {"large": "GPT and Adam, 1.49 GB", "many_small": "20,000 tensors, 0.67 GB"}
_TABLES = re.compile(r"(?<=<!-- Written by docs/performance.py. -->\n\n).*?\n(?=\n<!-- End. -->)", re.S)


def _table(state: str, rows: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield f"| {_STATES[state]} | {' | '.join(_COLUMNS.values())} |"
    yield f"|---|{'---|' * len(_COLUMNS)}"
    for name, title in _ROWS.items():
        if name in rows:
            row = dict(rows[name])
            if "staged" in row and row["staged"] < 1.2 * row["stall"]:
                del row["staged"]  # the call returns after it
            yield f"| {title} | {' | '.join(_seconds(row.get(column)) for column in _COLUMNS)} |"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if value < 0.01 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def page() -> str:
    """docs/performance.md with the tables as they are to be."""
    numbers = json.loads(NUMBERS.read_text())
    lines = [f"{numbers['measured']}, seconds:"]
    for state, rows in numbers["figures"].items():
        lines += ["", *_table(state, rows)]
    return _TABLES.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
