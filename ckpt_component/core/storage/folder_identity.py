"""Which folder a path is. A folder has many spellings: links, mounts in two places, `..`, a working directory.

This is the only place that decides whether two paths are one folder: by the device and inode of what is there. What is
not there yet is named by the nearest folder above it. A URL is its normalised text. All of it holds on this host, now:
to find a folder again later, or on another host, read the mark that is in it (`core/commit/fencing.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .locate import absolute, is_url


def folder_id(path: str | os.PathLike[str]) -> str:
    """A text that all spellings of a folder have in common, and no other folder has while this one exists.

    Args:
        path: of a folder or file, which need not exist; or a URL
    """
    return absolute(path) if is_url(path) else _id_of(_real(path))


def same_folder(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths are one folder."""
    return absolute(one) == absolute(other) or folder_id(one) == folder_id(other)


def below(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str | None:
    """Where a path is in a folder.

    Returns:
        The rest of the path, with slashes; empty: it is the folder; None: it is not in it.
    """
    wanted, rest = folder_id(folder), list[str]()
    for above in with_those_above(path):
        if folder_id(above) == wanted:
            return "/".join(reversed(rest))
        rest.append(os.path.basename(above))
    return None


def with_those_above(path: str | os.PathLike[str]) -> Iterator[str]:
    """A path without links, then the folders that it is in, up to the root of the files, or the bucket."""
    place, in_bucket = (absolute(path), True) if is_url(path) else (_real(path), False)
    while True:
        yield place
        above = os.path.dirname(place)
        if above == place or (in_bucket and not is_url(above)):
            return
        place = above


def _real(path: str | os.PathLike[str]) -> str:
    # `..` is the folder above in the text, as everywhere else; a link before it is not followed.
    return os.path.realpath(absolute(path))


def _id_of(place: str) -> str:
    """See `folder_id`, of a path without links."""
    rest = ""
    while True:
        try:
            status = os.stat(place)
        except OSError:  # it is not there, or cannot be looked at: then the folder above and the name are all there is
            place, name = os.path.split(place)
            rest = f"/{name}{rest}"
            continue
        return f"{status.st_dev:x}:{status.st_ino:x}{rest}"
