"""The listing of published weights for `ckpt ls SOURCE`: which versions there are, and what each builds on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.storage.space import amount
from ..core.storage.storage import Storage
from ..publishing.versions import NAMES, Version, Versions
from .output import Output
from .text import Table, age_text, counted


def has_versions(storage: Storage, path: str) -> bool:
    """Whether a folder has versions of published weights; none of those that have names of steps is one."""
    return any(NAMES.step_of(name) is not None for name in storage.names(path))


def list_versions(storage: Storage, path: str, output: Output) -> None:
    """Print the versions in a folder, oldest first; those that are damaged are warnings."""
    versions = [*Versions(storage, path).look().values()]
    output.result({"root": path, "versions": [*map(_data, versions)]}, _lines(path, versions, output))


def _data(version: Version) -> dict[str, Any]:
    names = ("number", "base", "step", "path", "nbytes", "created", "committed")
    return {name: getattr(version, name) for name in names}


def _lines(path: str, versions: Sequence[Version], output: Output) -> Iterator[str]:
    if not versions:
        yield f"no versions in {path}"
        return
    rows = [("version", "step", "age", "size", "what"), *map(_row, versions)]
    yield from output.table(Table(rows, left=(4,)), ["green" if each.is_whole else "" for each in versions])
    yield ""
    whole = sum(version.is_whole for version in versions)
    yield f"{counted(len(versions), 'version')}, {whole} whole, {amount(sum(version.nbytes for version in versions))}"


def _row(version: Version) -> tuple[str, ...]:
    what = "whole" if version.is_whole else f"changes of version {version.base}"
    step = "" if version.step is None else str(version.step)
    return str(version.number), step, age_text(time.time() - version.created), amount(version.nbytes), what
