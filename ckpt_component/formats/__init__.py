"""Each format of checkpoints: layout, index, reading and writing. Indexes are read without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from .index import Contents as Contents, Entry as Entry, Index as Index
    from .opening import open_index as open_index
    from .rank_index import StoredRange as StoredRange

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {".index": "Contents Entry Index", ".opening": "open_index", ".rank_index": "StoredRange"},
)
