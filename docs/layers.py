"""The packages by layer, from the lowest up, and their table in docs/design.md: `python docs/layers.py` writes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "design.md"

#: A package, or a module that is in none, imports from the layers below its own, and from those before it in its layer;
#: `tests/test_layers.py` checks it.
LAYERS = {
    "ground": (
        *("errors", "_version", "core.waits", "core.sockets", "core.available_memory", "core.options"),
        *("core.outside", "core.libc", "core.pages", "core.gc_control", "core._lazy", "core.spelling", "core.progress"),
    ),
    "outside": ("core.processes", "core.lane", "core.job", "core.storage", "state", "core.coordination"),
    "image and commit": ("core.commit", "core.image"),
    "formats": ("events", "core.writing", "formats", "writers"),
    "configs, loads": ("config", "loading"),
    "parts": ("exporting", "publishing", "compat", "callers", "stagers"),
    "one save, a run": ("background", "saving", "checkpointer", "managing"),
    "other processes and hosts": ("hosts",),
    "assembly": ("factory",),
    "for users": ("testing", "megatron", "integrations", "cli", "train", "_hydra_searchpath"),
}
_TABLE = re.compile(r"(?<=<!-- Written by docs/layers.py. -->\n\n).*?\n(?=\n|\Z)", re.S)
_SENTENCE = re.compile(r"(.*?\.)(?=\s|\Z)", re.S)


def sentence_of(package: str) -> str:
    """The first sentence of the docstring of a package or module."""
    path = REPOSITORY.joinpath("ckpt_component", *package.split("."))
    text = ast.get_docstring(
        ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    )
    first = _SENTENCE.match(text or "")
    if first is None:
        raise ValueError(f"{path} has no docstring that begins with a sentence")
    return " ".join(first[1].split())


def page() -> str:
    """docs/design.md with the table as it is to be."""
    lines = ["| layer | package | what it is |", "|---|---|---|"]
    for layer, packages in reversed(LAYERS.items()):
        for package in reversed(packages):
            lines.append(f"| {layer} | `{package}` | {sentence_of(package)} |")
            layer = ""
    return _TABLE.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
