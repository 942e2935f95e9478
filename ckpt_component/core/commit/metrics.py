"""Metrics of a checkpoint, such as a validation loss: numbers by name, in its manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointCorruptError, CheckpointTypeError

#: JSON has no numbers for these, so they are strings in a manifest.
_NOT_FINITE = ("nan", "inf", "-inf")


def encode_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Convert metrics to JSON values.

    Args:
        metrics: numbers by name; a number is anything that `float` converts and that is not text, such as a tensor
            of one element

    Raises:
        CheckpointTypeError: they are not numbers by name; the text says which is none
    """
    if not isinstance(metrics, Mapping):
        raise CheckpointTypeError(
            f"metrics is {metrics!r:.100}, a {type(metrics).__name__}; pass numbers by name: metrics={{'loss': 0.5}}."
        )
    encoded: dict[str, float | str] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise CheckpointTypeError(
                f"metrics has the name {name!r:.100}; names are strings: metrics={{'loss': 0.5}}."
            )
        try:
            # `float` of a tensor that requires a gradient warns.
            plain = value.item() if hasattr(value, "item") else value
            number = None if isinstance(plain, (str, bytes, bytearray)) else float(plain)
        except Exception:  # a tensor of several elements, a complex number, and what else users have
            number = None
        if number is None:
            shape = getattr(value, "shape", None)
            text = f"{value!r:.100}, a {type(value).__name__}" if shape is None else f"of shape {tuple(shape)}"
            raise CheckpointTypeError(f"metrics[{name!r}] is {text} and not one number; pass float(value).")
        encoded[name] = number if math.isfinite(number) else str(number)
    return encoded


def metrics_of(manifest: Mapping[str, Any], path: str) -> dict[str, float]:
    """The metrics in a manifest; none in that of an older release.

    Args:
        manifest: content of the manifest
        path: the checkpoint, for the error

    Raises:
        CheckpointCorruptError: they are not numbers by name
    """
    stored = manifest.get("metrics", {})
    if not isinstance(stored, dict):
        raise CheckpointCorruptError(f"{path} gives {stored!r:.200} as metrics.")
    for name, value in stored.items():
        if type(value) not in (int, float) and value not in _NOT_FINITE:
            raise CheckpointCorruptError(f"{path} gives {value!r:.200} as the metric {name!r:.200}.")
    return {name: float(value) for name, value in stored.items()}
