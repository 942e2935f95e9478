"""What a checkpoint of any format says it holds: keys, dtypes, shapes and places of the items. Imports no torch."""

from .entries import Catalogue, Entry, Piece
from .opening import open_catalogue

__all__ = ["Catalogue", "Entry", "Piece", "open_catalogue"]
