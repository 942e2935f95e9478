"""What differs between the configs, versions and commits that two checkpoints were saved with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..core.commit.run_record import StoredConfig

#: Stands for a key that is not there.
MISSING = "unset"


@dataclass(frozen=True)
class Change:
    """A key with its value before and after, as text."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def config_changes(before: StoredConfig, after: StoredConfig) -> list[Change]:
    """The keys whose resolved values differ; `versions.torch` and `commit` are such keys too."""
    old, new = dict(_values(before)), dict(_values(after))
    keys = [*old, *(key for key in new if key not in old)]
    pairs = [(key, old.get(key, MISSING), new.get(key, MISSING)) for key in keys]
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def _values(stored: StoredConfig) -> Iterator[tuple[str, str]]:
    yield from _leaves("", stored.resolved)
    yield from _leaves("versions.", stored.versions)
    if stored.commit is not None:
        yield "commit", stored.commit[:12]


def _leaves(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
