"""A checkpoint under other keys, for one load."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.spelling import warn_deprecated
from ..state.key_map import KeyMap, RenamedKeys, names_above
from ..state.paths import key_of
from ..state.wrapped_modules import without_wrappers
from .source import RenamedSource, Source


class MappedSource(RenamedSource):
    """A checkpoint under the keys that a key map gives it.

    Args:
        source: the checkpoint
        key_map: its new keys

    Raises:
        CheckpointLoadError: a rename fits no key, takes a whole key away, or gives two values one key
    """

    def __init__(self, source: Source, key_map: KeyMap) -> None:
        self._key_map = key_map
        self._renamed = renamed = RenamedKeys(source.contents.paths(), key_map, source.where)
        super().__init__(source, source.contents.renamed(renamed), renamed.old)
        self._unused = renamed.unused
        ignored_names = key_map.ignored_names()
        above = {name for key in self._old for name in names_above(key)} if ignored_names else set()
        #: Names in the target whose values stay as they are.
        self._ignored = {name for key in renamed.ignored for name in (key, without_wrappers(key))}
        self._ignored.update(name for name in ignored_names if name not in above)
        #: Names in `ignore` that only the target may have.
        self._for_target = frozenset(self._unused)
        self._retire_unwrapping()
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

    def _retire_unwrapping(self) -> None:
        """Accept a rename that fits no key if it takes away a wrapper's part: checkpoints of wrapped modules had it."""
        for name in [name for name, argument in self._unused.items() if argument == "rename"]:
            old, new = ".".join(filter(None, (self._key_map.prefix, name))), self.new_name(name)
            if without_wrappers(old) == without_wrappers(new):
                del self._unused[name]
                warn_deprecated(f"{name!r} in rename", "no rename, as modules load into any wrapping", removed_in="0.5")

    def new_name(self, name: str) -> str:
        """The new name of a value, from its name in the checkpoint."""
        return key_of(self._key_map.renamed(name, tuple(name.split(".")))[1])

    def is_ignored(self, key: str) -> bool:
        """Whether the value of a target's key stays as it is, because of `ignore`."""
        if any(name in self._ignored for name in names_above(key)):
            return True
        names = self._key_map.ignoring(key)
        return bool(names) and (self._key_map.keeps_names or any(name in self._for_target for name in names))
