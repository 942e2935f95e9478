"""Tensors that a load does not fill as they are: those of another shape that a module takes by its own code.

A buffer that grows, an observer that was calibrated, a description whose length follows its text: only the code of the
module knows what to do with them. It gets them as they are, if a copy of it takes the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..formats.index import Entry
from ..formats.source import DTYPES
from ..state.flatten import FlatState
from ..state.module_trial import modules_with_own_code, refusal_of
from ..state.paths import Path
from ..state.wrapped_modules import parts_to_fill, quantized_name
from .mismatch import Misfit


class HandedValues:
    """The tensors that modules are given as the checkpoint has them.

    Args:
        flat: the target
    """

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._parts: dict[Path, list[tuple[str, torch.nn.Module]]] = {}
        #: By path of a module in the target and what names of its part begin with: the part, and what it is given.
        self._handed: dict[tuple[Path, str], tuple[torch.nn.Module, dict[str, Entry]]] = {}

    def takes(self, module: torch.nn.Module, above: Path, path: Path, entry: Entry) -> bool:
        """Whether the code of a module, and not torch's, takes a tensor, which is then handed to it.

        Args:
            module: the module
            above: its path
            path: the path of the tensor
            entry: the tensor in the checkpoint
        """
        if above not in self._parts:
            self._parts[above] = [*modules_with_own_code(module)]
        name = self._flat.own_path(path)[len(above)]
        for prefix, part in self._parts[above]:
            if str(name).startswith(prefix) and len(path) == len(above) + 1 and entry.dtype in DTYPES:
                self._handed.setdefault((above, prefix), (part, {}))[1][name] = entry
                return True
        return False

    def refused(self) -> Iterator[Misfit]:
        """The tensors that modules would refuse."""
        flat = self._flat
        places = [
            *zip(flat.tensor_paths, flat.tensors, strict=True),
            *zip(flat.object_paths, flat.objects, strict=True),
        ]
        for (above, prefix), (part, handed) in self._handed.items():
            depth, state = len(above), dict[str, Any]()
            for path, value in places:
                name = flat.own_path(path)[depth] if len(path) == depth + 1 and path[:depth] == above else None
                if name is not None and str(name).startswith(prefix):
                    if name in handed:
                        entry = handed[name]
                        value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
                    state[name[len(prefix) :]] = value
            refusal = refusal_of(part, state)
            if refusal is not None:
                for entry in handed.values():
                    yield Misfit(entry.key, f"'{entry.key}' has shape {entry.shape} in the checkpoint ({refusal:.300})")


def with_parts_to_fill(flat: FlatState) -> FlatState:
    """A target in which the parts of quantized parameters are those that the layers have."""
    tensors = [*flat.tensors]
    for above, module in flat.quantized.items():
        depth = len(above)
        numbers = {
            flat.own_path(path)[depth]: number
            for number, path in enumerate(flat.tensor_paths)
            if len(path) == depth + 1 and path[:depth] == above
        }
        state = {name: tensors[number] for name, number in numbers.items()}
        for name, tensor in parts_to_fill(module, state).items():
            tensors[numbers[name]] = tensor
    return replace(flat, tensors=tensors)


def refuse_other_quantization(key: str, here: Iterable[str], there: Iterable[str]) -> None:
    """Refuse to fill a weight that is quantized in one of the target and the checkpoint alone.

    Args:
        key: its key
        here: the keys of the target
        there: those of the checkpoint

    Raises:
        Misfit: it is so
    """
    own, stored = (quantized_name(key, {*keys}) for keys in (here, there))
    if stored is not None and own is None:
        fact = f"'{key}' is quantized in the checkpoint ('{stored}') and not in the target"
        raise Misfit(key, fact, "quantize the model first, as by moving it to its device")
    if own is not None and stored is None:
        raise Misfit(key, f"'{key}' is quantized in the target ('{own}') and not in the checkpoint", "load it first")
