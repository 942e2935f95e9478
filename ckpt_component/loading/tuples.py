"""Compare a tuple of the target with that of a checkpoint: like a list, though it is replaced and not filled in place.

A checkpoint has a tuple as one object, so what it holds has no keys there, and is known only when it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..formats.source import DTYPE_NAMES
from .kinds import binding_kind
from .mismatch import Misfit, Mismatches


class TupleFit:
    """Compares tuples, and collects how they differ.

    Args:
        mismatches: takes values of another kind, shape or dtype
        allow_dtype_cast: whether tensors are converted

    Attributes:
        missing: keys that the target has and the checkpoint lacks
        unexpected: keys that the checkpoint has and the target lacks
    """

    def __init__(self, mismatches: Mismatches, *, allow_dtype_cast: bool) -> None:
        self._mismatches = mismatches
        self._allow_dtype_cast = allow_dtype_cast
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def fit(self, own: Any, stored: Any, key: str) -> Any:
        """Compare a value of the target with that of the checkpoint.

        Args:
            own: the target's
            stored: the checkpoint's
            key: its key

        Returns:
            The value to put into the target: the stored one, with what only the target has.
        """
        kind = binding_kind(own)
        if kind is None or (stored is None and kind != "tensor"):  # as outside of tuples: None counts as absent
            return stored
        if kind != binding_kind(stored):
            here, there = (
                "tensor" if isinstance(each, torch.Tensor) else type(each).__name__ for each in (own, stored)
            )
            self._mismatches.add(Misfit.of_kind(key, here, there))
            return own
        if kind == "tensor":
            return self._fit_tensor(own, stored, key)
        if isinstance(own, Mapping):
            return self._fit_parts(dict(own), stored, key) if own else stored
        if isinstance(own, (list, tuple)) and _holds_tensors(own):
            parts = self._fit_parts(dict(enumerate(own)), dict(enumerate(stored)), key)
            return type(stored)(parts.values())
        return stored

    def _fit_tensor(self, own: torch.Tensor, stored: torch.Tensor, key: str) -> torch.Tensor:
        if own.shape != stored.shape:
            self._mismatches.add(Misfit.of_shape(key, own.shape, stored.shape))
        elif own.dtype != stored.dtype:
            if self._allow_dtype_cast:
                return stored.to(own.dtype)
            self._mismatches.add(Misfit.of_dtype(key, own.dtype, DTYPE_NAMES[stored.dtype]))
        return stored

    def _fit_parts(self, own: Mapping[Any, Any], stored: Mapping[Any, Any], key: str) -> dict[Any, Any]:
        parts = {}
        for name, value in own.items():
            if name in stored:
                parts[name] = self.fit(value, stored[name], f"{key}.{name}")
            else:
                self.missing.append(f"{key}.{name}")
                parts[name] = value
        self.unexpected += [f"{key}.{name}" for name in stored if name not in own]
        return parts


def _holds_tensors(value: Any) -> bool:
    """Whether a tuple is compared element by element; one of plain values is itself one, as such a list is."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return binding_kind(value) in ("tensor", "dict")
