"""`ckpt du [ROOT...]`: what folders of checkpoints take, where checkpoints share files.

Show for each checkpoint its size, what deleting it would free, and what other checkpoints have too; then what the
folder takes, with each file counted once. Several folders are compared with each other.

example:
  ckpt du checkpoints

Only a file system has files that are shared. In a bucket, every checkpoint
takes its size.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..core.commit.names import QUARANTINE_PREFIX
from ..core.storage.locate import is_url
from ..core.storage.space import amount
from ..core.storage.storage import StoredFile
from ..formats.checkpoints import Root, find_root
from .listing import DEBRIS, IN_PROGRESS, STYLES, Listed, advice, entries_of, what_text
from .output import Output
from .roots import shown
from .text import Table
from .usage import Usage, files_in, usage_of

#: Of a table's row for what belongs to no checkpoint.
_OTHERS = "other files"


@dataclass(frozen=True)
class UsedRoot:
    """A folder of checkpoints and its files.

    Attributes:
        root: the folder
        entries: what is in it
        files: the files of each entry, by its name; at the empty name, the files of none
    """

    root: Root
    entries: Sequence[Listed]
    files: Mapping[str, Sequence[StoredFile]]

    @property
    def all_files(self) -> list[StoredFile]:
        """The files of the folder."""
        return [*chain.from_iterable(self.files.values())]

    def usage_of(self, *names: str) -> Usage:
        """The room that some entries take together."""
        return usage_of(chain.from_iterable(self.files.get(name, ()) for name in names))

    @property
    def set_aside(self) -> Usage:
        """The room of damaged and retired checkpoints."""
        return self.usage_of(*(each.name for each in self.entries if each.name.startswith(QUARANTINE_PREFIX)))

    @property
    def unfinished(self) -> Usage:
        """The room of saves and deletions that are in progress, or were cut off."""
        names = [each.name for each in self.entries if each.state in (IN_PROGRESS, DEBRIS)]
        return self.usage_of(*(name for name in names if not name.startswith(QUARANTINE_PREFIX)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("roots", metavar="ROOT", nargs="*", default=["."], help="folders of checkpoints; default: .")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Show what folders take.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is a checkpoint itself
    """
    used = [_used(find_root(argument, parsed.options)) for argument in parsed.roots]
    together = usage_of({file.path: file for each in used for file in each.all_files}.values())
    data = {
        "roots": [_as_data(each) for each in used],
        "bytes": together.taken,
        "unshared_bytes": together.size,
    }
    output.result(data)
    for argument, each in zip(parsed.roots, used, strict=True):
        output.show(_lines(each, output, titled=len(used) > 1))
        if not each.entries and not is_url(argument):
            output.show(advice(each.root, argument, "du"))
    if len(used) > 1:
        output.show(["", f"together: {_taken(together)}"])


def _used(root: Root) -> UsedRoot:
    entries = entries_of(root)
    names, files = {entry.name for entry in entries}, defaultdict[str, list[StoredFile]](list)
    base = root.path if is_url(root.path) else os.path.realpath(root.path)
    for file in files_in(root.fs, root.path):
        first, _, rest = file.path.removeprefix(base).lstrip("/").partition("/")
        attempt = f"{first}/{rest.partition('/')[0]}"  # an attempt is inside of the folder of its step
        files[attempt if attempt in names else first if first in names else ""].append(file)
    return UsedRoot(root, entries, files)


def _as_data(used: UsedRoot) -> dict[str, Any]:
    whole = usage_of(used.all_files)
    entries = [(entry, used.usage_of(entry.name)) for entry in used.entries]
    return {
        "root": used.root.path,
        "entries": [
            {
                "name": entry.name,
                "path": os.path.join(used.root.path, entry.name),
                "state": entry.state,
                "step": entry.step,
                "bytes": usage.taken,
                "only_bytes": usage.freed,
                "shared_bytes": usage.shared,
            }
            for entry, usage in entries
        ],
        "other_bytes": used.usage_of("").taken,
        "unfinished_bytes": used.unfinished.freed,
        "set_aside_bytes": used.set_aside.freed,
        "bytes": whole.taken,
        "unshared_bytes": whole.size,
        "elsewhere_bytes": whole.shared,
    }


def _lines(used: UsedRoot, output: Output, *, titled: bool) -> Iterator[str]:
    if titled:
        yield from ("", output.style(shown(used.root.path), "bold"))
    if used.entries:
        usages = [used.usage_of(entry.name) for entry in used.entries]
        rows = [
            ["" if entry.step is None else str(entry.step), *_cells(usage), what_text(used.root, entry)]
            for entry, usage in zip(used.entries, usages, strict=True)
        ]
        if (others := used.usage_of("")).size:
            rows.append(["", *_cells(others), _OTHERS])
        rows.insert(0, ["step", "size", "only", "shared", "what"])
        if not any(usage.shared for usage in usages):
            rows = [[*row[:2], row[-1]] for row in rows]
        styles = [STYLES.get(entry.state, "") for entry in used.entries]
        yield from output.table(Table(rows, left=(-1,)), [*styles, "dim"])
        yield ""
    yield _taken(usage_of(used.all_files))
    rest = ((used.unfinished, "unfinished", "gc"), (used.set_aside, "set aside", "rm"))
    freed = [f"{amount(usage.freed)} {what} (ckpt {command})" for usage, what, command in rest if usage.size]
    if freed:
        yield f"deleting would free: {', '.join(freed)}"


def _cells(usage: Usage) -> tuple[str, str, str]:
    return amount(usage.taken), amount(usage.freed), amount(usage.shared)


def _taken(usage: Usage) -> str:
    """The line of totals: `takes 4.64 MB; without shared files it would take 25.71 MB`."""
    parts = [f"takes {amount(usage.taken)}"]
    if usage.size > usage.taken:
        parts.append(f"without shared files it would take {amount(usage.size)}")
    if usage.shared:
        parts.append(f"{amount(usage.shared)} of it is in other folders too")
    return "; ".join(parts if len(parts) > 1 else [*parts, "no file is shared"])
