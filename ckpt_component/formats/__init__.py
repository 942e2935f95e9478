"""What is in a checkpoint of any format: keys, shapes, places of the items, zip records. Imports no torch."""

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
