"""What is in a checkpoint of any format: keys, dtypes, shapes, and places of the items. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .entries import Catalogue, Entry, Piece
    from .opening import open_catalogue

__all__, __getattr__, __dir__ = lazy(__name__, {".entries": "Catalogue Entry Piece", ".opening": "open_catalogue"})
