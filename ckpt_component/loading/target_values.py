"""Values of a target that need more than to be filled.

Of another shape, quantized, in the state of a parameter, under other names, or in tuples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointLoadError
from ..formats.index import Contents, Entry
from ..formats.source import DTYPE_NAMES, DTYPES, MappedSource, RenamedSource, Source
from ..state.flatten import FlatState, Stateful
from ..state.module_trial import modules_with_own_code, refusal_of
from ..state.paths import Path
from ..state.wrapped_modules import (
    QUANTIZED_MARKS,
    QuantDescription,
    names_in_other_wrapping,
    parts_to_fill,
    quantized_name,
)
from .kinds import binding_kind
from .mismatch import Misfit, Mismatches


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


def parameter_of(stateful: Stateful, path: Path) -> torch.Tensor | None:
    """The parameter whose state has a value, by the path below an optimizer, such as state.3.exp_avg; or None."""
    if not isinstance(stateful, torch.optim.Optimizer) or len(path) != 3 or path[0] != "state":
        return None
    parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
    number = int(path[1]) if str(path[1]).isdigit() else len(parameters)
    return parameters[number] if number < len(parameters) else None


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


def refuse_other_descriptions(
    descriptions: Mapping[str, QuantDescription], loaded: Mapping[str, Any], where: str
) -> None:
    """Refuse a checkpoint whose parameters are quantized in another way.

    Args:
        descriptions: those of the target, by key
        loaded: what the checkpoint has there
        where: the checkpoint, for the text

    Raises:
        CheckpointLoadError: it is so
    """
    for key, description in descriptions.items():
        if difference := description.difference(loaded[key]):
            weight = key.partition(QUANTIZED_MARKS[0])[0]
            raise CheckpointLoadError(
                f"{where} does not fit the target: '{weight}' {difference}; quantize the model as it was when it was "
                "saved."
            )


def under_names_of_target(
    source: Source, keys: Sequence[str], paths: Sequence[Path], mapped: MappedSource | None = None
) -> tuple[Source, list[str]]:
    """Give values of a checkpoint the names that a target has for them, if only parts of wrappers differ.

    A value is renamed if the target lacks its name, the checkpoint lacks the target's, and no other value of either
    has the same name without these parts.

    Args:
        source: the checkpoint
        keys: all keys of the target
        paths: their paths
        mapped: knows which of them are not loaded, so that their values are left out; None: all are loaded

    Returns:
        The checkpoint, and a sentence about what was renamed, to log.
    """
    contents, place_of = source.contents, dict(zip(keys, paths, strict=True))
    known = contents.entries()
    found = names_in_other_wrapping(place_of.keys() - known.keys(), known.keys() - place_of.keys())
    if not found:
        return source, []
    dropped = {key for key in found if mapped is not None and mapped.is_ignored(key)}
    new_keys, new_paths = {old: key for key, old in found.items()}, dict[Path, Path]()
    renamed = Contents(columns=contents.columns)
    for old, entry in known.items():
        key = new_keys.get(old, old)
        if key not in dropped:
            path = place_of[key] if key in found else entry.path
            (renamed.tensors if entry.dtype else renamed.objects)[key] = Entry(key, path, *entry[2:])
            if key in found:
                new_paths.update(_around(entry.path, path))
    renamed.containers = [(new_paths.get(path, path), kind) for path, kind in contents.containers]
    taken = sorted(found.keys() - dropped)
    more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
    text = f"{more} under the name of another wrapping, such as"
    return RenamedSource(source, renamed, found), [
        f"{source.where} has '{key}'{text} '{found[key]}'" for key in taken[:1]
    ]


def _around(old: Path, new: Path) -> dict[Path, Path]:
    """The containers around a value that are below the name that differs, by old path, with their new ones."""
    pairs = enumerate(zip(reversed(old), reversed(new), strict=False))
    depth = next((depth for depth, (part, other) in pairs if part != other), 0)
    return {old[:-back]: new[:-back] for back in range(1, depth + 1)}


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
