"""A checkpoint under other keys, for one load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.progress import Progress, no_progress
from ..core.state.key_map import KeyMap, RenamedKeys, names_above
from ..core.state.paths import key_of
from .source import Request, Source


class MappedSource(Source):
    """A checkpoint with other keys. Only the keys differ: messages about its files name those that are stored.

    Args:
        source: the checkpoint
        key_map: its new keys

    Raises:
        CheckpointLoadError: a rename fits no key, takes a whole key away, or gives two values one key
    """

    def __init__(self, source: Source, key_map: KeyMap) -> None:
        self._source = source
        self._key_map = key_map
        self.where = source.where
        self._renamed = renamed = RenamedKeys(source.contents.paths(), key_map, source.where)
        self._old, self._unused = renamed.old, renamed.unused
        self.contents = source.contents.renamed(renamed)
        ignored_names = key_map.ignored_names()
        above = {name for key in self._old for name in names_above(key)} if ignored_names else set()
        #: Names in the target whose values stay as they are.
        self._ignored = renamed.ignored | {name for name in ignored_names if name not in above}
        #: Names in `ignore` that only the target may have.
        self._for_target = frozenset(self._unused)
        renamed.refuse_unused("rename")

    def check_ignored(self, keys: Iterable[str]) -> None:
        """Refuse a name in `ignore` that fits no key of the checkpoint and none of these, which a target has.

        Raises:
            CheckpointLoadError: there is such a name
        """
        for key in keys if self._unused else ():
            for name in self._key_map.ignoring(key):
                self._unused.pop(name, None)
        self._renamed.refuse_unused()

    def new_name(self, name: str) -> str:
        """The new name of a value, from its name in the checkpoint."""
        return key_of(self._key_map.renamed(name, tuple(name.split(".")))[1])

    def is_ignored(self, key: str) -> bool:
        """Whether the value of a target's key stays as it is, because of `ignore`."""
        if any(name in self._ignored for name in names_above(key)):
            return True
        names = self._key_map.ignoring(key)
        return bool(names) and (self._key_map.keeps_names or any(name in self._for_target for name in names))

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read the tensors under the keys that they are stored with."""
        old = self._old
        stored = [Request(old[key], into, offsets, address) for key, into, offsets, address in requests]
        self._source.read_tensors(stored, progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Read the objects under the keys that they are stored with."""
        values = self._source.read_objects([self._old[key] for key in keys])
        return {key: values[self._old[key]] for key in keys}

    def new_tensors(self, keys: Iterable[str], progress: Progress = no_progress) -> dict[str, torch.Tensor]:
        """As of the checkpoint."""
        keys = [*keys]
        tensors = self._source.new_tensors([self._old[key] for key in keys], progress)
        return {key: tensors[self._old[key]] for key in keys}
