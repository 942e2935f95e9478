"""A folder that is mounted in two places, and what a child of the fork server finds there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import fork_server


@contextlib.contextmanager
def bound(folder: Path, place: Path) -> Iterator[Path]:
    """Inside the block, for what the fork server starts, a folder is mounted at a second place, too."""
    server = fork_server()
    if server.unmountable:
        pytest.skip(server.unmountable)
    place.mkdir()
    server.here("faults.mounts:bind", path=str(folder), place=str(place))
    try:
        yield place
    finally:
        server.here("faults.mounts:unmount", folder=str(place))


def asked(question: str, **arguments: Any) -> Any:
    """What a function of this module finds, in a child of the fork server."""
    return fork_server().run(f"bound:{question}", **arguments)


def ids(paths: list[str]) -> list[str]:
    """What each folder is."""
    from ckpt_component.core.storage.locate import folder_id

    return [folder_id(path) for path in paths]


def refusal(dir: str, overrides: list[str]) -> str:
    """The error of a run with this config; empty: it begins."""
    from ckpt_component import CheckpointError, build_manager

    try:
        build_manager("sync", overrides, dir=dir).close()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""
