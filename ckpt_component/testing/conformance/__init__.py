"""What parts must do, as classes of tests: derive from one and run pytest."""

from __future__ import annotations

from .storage_contract import StorageContract

__all__ = ["StorageContract"]
