"""Values as bytes for the store that the ranks share."""

from __future__ import annotations

import json
import zlib
from typing import Any


def pack(value: Any) -> bytes:
    """A plain value as bytes for the store."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return json.loads(zlib.decompress(data))
