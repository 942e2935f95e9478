"""Random operations on a few files, the same on a real disk and on a simulated one, and what is there after them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from ckpt_component.core.storage.files import FileStorage

NAMES = ("a", "b", "c", "below/a", "below/b")
#: Each file has a letter of its own, so that its bytes tell which one it is.
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def play(
    files: FileStorage, folder: str, seed: int, length: int, created: Callable[[str], None] = lambda path: None
) -> list[str]:
    """Do random operations in an empty folder, whose name is durable.

    Args:
        files: where
        folder: the folder
        seed: chooses the operations
        length: their number
        created: called with the path of each new file, when its bytes are written

    Returns:
        What was done, for a report.
    """
    choice, there, letters, done = random.Random(seed), set[str](), iter(_LETTERS), list[str]()
    files.make_folder(f"{folder}/below")
    for _ in range(length):
        free = sorted({*NAMES} - there)
        kinds = ["create"] * 2 * bool(free) + ["sync_folder"]
        kinds += ["rename", "unlink", "replace"] * bool(there)
        kind = choice.choice(kinds)
        name = choice.choice(sorted(there)) if there else ""
        other = choice.choice(free) if free else ""
        if kind == "create":
            fd = files.create(f"{folder}/{other}")
            content = bytes([next(letters)]) * choice.choice((100, 700, 1500))
            files.write(fd, [memoryview(content)], 0)
            if choice.random() < 0.5:
                files.sync(fd)
                kind = "create, sync"
            files.close(fd)
            created(f"{folder}/{other}")
            there.add(other)
        elif kind == "sync_folder":
            other = choice.choice(("", "/below"))
            files.sync_folder(folder + other)
        elif kind == "unlink":
            files.unlink(f"{folder}/{name}")
            there.discard(name)
        elif kind == "replace":
            other = choice.choice(sorted({*NAMES} - {name}))
            files.replace(f"{folder}/{name}", f"{folder}/{other}")
            there.discard(name)
            there.add(other)
        elif free:
            files.rename_new(f"{folder}/{name}", f"{folder}/{other}")
            there.discard(name)
            there.add(other)
        done.append(f"{kind} {name} {other}".strip())
    return done


def play_on_disk(folder: str, seed: int, length: int) -> list[str]:
    """The same in a new folder of a real disk."""
    os.mkdir(folder)
    os.sync()
    return play(FileStorage(), folder, seed, length)


def tree(folder: str) -> dict[str, str | None]:
    """What is below a folder: the bytes of files, None for folders."""
    paths = sorted(Path(folder).rglob("*"))
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes().decode("latin-1") for path in paths
    }
