"""The rooms of the package, from the ground up, and their table in docs/design.md: `python docs/rooms.py` writes it."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "design.md"

#: A room imports from the storeys below its own, and from the rooms before it in its storey; `tests/test_rooms.py`
#: checks it.
STOREYS = {
    "ground": (
        *("errors", "_version", "core.waits", "core.sockets", "core.available_memory", "core.outside", "core.libc"),
        *("core.pages", "core.gc_control", "core._lazy", "core.options", "core.spelling", "core.progress"),
    ),
    "outside": ("core.processes", "core.lane", "core.job", "core.storage", "state", "core.coordination"),
    "image and commit": ("core.commit", "core.image"),
    "formats": ("events", "core.writing", "formats", "writers"),
    "configs, loads": ("config", "loading"),
    "parts": ("exporting", "publishing", "compat", "callers", "stagers"),
    "one save, a run": ("background", "saving", "checkpointer", "managing"),
    "other processes and hosts": ("hosts",),
    "assembly": ("factory",),
    "faces": ("testing", "megatron", "integrations", "cli", "train", "_hydra_searchpath"),
}
_TABLE = re.compile(r"(?<=<!-- Written by docs/rooms.py. -->\n\n).*?\n(?=\n|\Z)", re.S)


def page() -> str:
    """docs/design.md with the table as it is to be."""
    lines = ["| storey | rooms |", "|---|---|"]
    for storey, rooms in reversed(STOREYS.items()):
        lines.append(f"| {storey} | {', '.join(f'`{room}`' for room in reversed(rooms))} |")
    return _TABLE.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
