"""The git commit of a folder, read from git's own files.

So git need not be installed, cannot refuse a folder of another user, and no process is started from one that may hold
a CUDA context or InfiniBand connections.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from ..core.outside import OUTSIDE

logger = logging.getLogger(__name__)

#: A SHA-1 or SHA-256 in hexadecimal.
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
#: Larger than any of the files but `packed-refs`, which has a line for each of perhaps many branches.
_MAX_CHARACTERS = 64 << 20


def commit_of(folder: str, seconds: float = 2.0) -> str | None:
    """The commit that is checked out in a folder or one above it; None if there is none.

    Args:
        folder: where to begin
        seconds: how long to wait for storage that does not answer; one log line then, or if a file cannot be read
    """
    commits: list[str | None] = []

    def read() -> None:
        try:
            commits.append(_commit(Path(folder)))
        except (OSError, ValueError) as error:
            commits.append(None)
            logger.info("the git commit of %s could not be read: %s", folder, error)

    OUTSIDE.start("ckpt-git", read).join(seconds)
    if not commits:
        logger.info("the git commit of %s could not be read within %g s", folder, seconds)
        return None
    return commits[0]


def _commit(folder: Path) -> str | None:
    git = next((path / ".git" for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    if git is None:
        return None
    if git.is_file():  # of a worktree or a submodule: it names the folder
        git = git.parent / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD")
    if not head.startswith("ref:"):
        return _checked(head)
    name = head.removeprefix("ref:").strip()
    link = git / "commondir"
    shared = git / _text(link) if link.is_file() else git
    for place in (git, shared):
        if (place / name).is_file():
            return _checked(_text(place / name))
    packed = shared / "packed-refs"
    for line in _text(packed).splitlines() if packed.is_file() else ():
        commit, _, branch = line.partition(" ")
        if branch == name:
            return _checked(commit)
    return None  # no commit yet


def _checked(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


def _text(path: Path) -> str:
    with path.open(encoding="utf-8") as stream:
        return stream.read(_MAX_CHARACTERS).strip()
