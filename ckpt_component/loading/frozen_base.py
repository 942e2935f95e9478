"""Checkpoints without frozen parameters (`checkpoint.save.frozen=skip`): whether a target has the same ones.

Each rank compares what it has with the digests that were stored. Of a tensor that is sharded in another way now, only
the sum over all ranks says whether it is the same, so the ranks tell each other what they have of these.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ..errors import CheckpointCorruptError
from ..formats.source import MappedSource, Source
from ..state.digests import add_up
from ..state.flatten import FlatState
from ..state.frozen_weights import FrozenPart, FrozenWeights, parts_at, read_record
from ..state.paths import FROZEN, key_of
from .mismatch import Misfit

logger = logging.getLogger("ckpt_component.readers")

#: By key of a tensor and place of a part of it, which is empty for the whole: the digest of the part.
Digests = dict[str, dict[str, str]]
#: What ranks tell each other: the parts of sharded tensors, and the keys of those that differ.
FrozenMessage = tuple[Digests, Sequence[str]]


class FrozenBase:
    """The frozen tensors that a checkpoint has digests of, and what a target has of them.

    Args:
        source: the checkpoint
        mapped: gives keys other names; None: they keep them

    Attributes:
        keys: the keys of the tensors
        records: the keys of what is stored for them

    Raises:
        CheckpointCorruptError: what is stored for them makes no sense
    """

    def __init__(self, source: Source, mapped: MappedSource | None) -> None:
        self._where = source.where
        found = {key: entry.path for key, entry in source.contents.objects.items() if FROZEN in entry.path}
        self.records = [*found]
        self._stored: dict[str, FrozenPart] = {}
        self._digests: Digests = defaultdict(dict)
        #: Paths of the modules that have had them.
        self._modules = {path[: path.index(FROZEN)] for path in found.values()}
        for key, value in source.read_objects(self.records).items():
            try:
                parts = read_record(value)
            except ValueError as error:
                raise CheckpointCorruptError(f"'{key}' in {self._where} cannot be read: {error}.") from error
            for part in parts:
                name = part.key if mapped is None else mapped.new_name(part.key)
                if name not in source.contents.tensors and (mapped is None or not mapped.is_ignored(name)):
                    self._stored[name] = part
                    self._digests[name][_place(part)] = part.digest
        self.keys = self._stored.keys()
        #: Of the sharded tensors, which all ranks compare together, the parts that this one has.
        self._open: Digests = {}
        #: Keys of tensors that differ.
        self._others: list[str] = []
        #: Keys of tensors that have no values, on the meta device.
        self._on_meta: list[str] = []

    def without_records(self, source: Source) -> Source:
        """The checkpoint without what is stored for the tensors."""
        objects = {key: entry for key, entry in source.contents.objects.items() if key not in self.records}
        source = copy.copy(source)
        source.contents = replace(source.contents, objects=objects)
        return source

    def compare(self, flat: FlatState, weights: FrozenWeights | None) -> None:
        """Compare what this rank has.

        Args:
            flat: the target
            weights: of a run that resumes, what leaves them out of its saves, and learns what the script has made
        """
        tensors = zip(flat.tensor_paths, flat.tensors, strict=True)
        paths = {path: tensor.is_meta for path, tensor in tensors if key_of(path) in self.keys}
        self._on_meta = [key_of(path) for path, is_meta in paths.items() if is_meta]
        parts = parts_at(flat, [path for path, is_meta in paths.items() if not is_meta])
        if weights is not None:
            weights.built(flat, parts)
        modules = [
            path for path, value in flat.stateful if path in self._modules and isinstance(value, torch.nn.Module)
        ]
        here = {*map(key_of, [*flat.tensor_paths, *flat.elsewhere])}
        self._others = [key for key in self.keys - here if any(key.startswith(f"{key_of(path)}.") for path in modules)]
        for path, own in parts.items():
            key = key_of(path)
            stored = self._stored[key]
            if any((part.dtype, [*part.shape]) != (stored.dtype, [*stored.shape]) for part in own):
                self._others.append(key)
            elif any(part.region is not None for part in own):
                self._open[key] = {_place(part): part.digest for part in own}
            elif _whole({_place(part): part.digest for part in own}) != _whole(self._digests[key]):
                self._others.append(key)

    def message(self) -> FrozenMessage:
        """What this rank tells the others."""
        return self._open, self._others

    def settle(self, parts: Digests, others: Iterable[str]) -> None:
        """Compare what all ranks have together.

        Args:
            parts: the parts of sharded tensors that they have
            others: keys of the tensors that differ on some rank
        """
        self._others = [*{*others, *(key for key in self._open if _whole(parts[key]) != _whole(self._digests[key]))}]
        self._open = {}

    def misfit(self) -> Misfit | None:
        """What is to be said if the target has another base; None: it has the same one, as far as this rank knows."""
        if self._on_meta:
            first = min(self._on_meta)
            fact = (
                f"{len(self._on_meta)} of {len(self.keys)} frozen tensors are on the meta device, first '{first}', and "
                "checkpoint.save.frozen=skip has stored none of them"
            )
            return Misfit(first, fact, "load the base model before")
        unknown = [key for key, own in self._open.items() if not own.keys() <= self._digests[key].keys()]
        for key in self._open.keys() - unknown:
            if any(self._digests[key][place] != digest for place, digest in self._open[key].items()):
                self._others.append(key)
        if unknown:
            text = "%s: %d frozen tensors were sharded in another way, and are not compared by a rank that loads alone"
            logger.warning(text, self._where, len(unknown))
        if not self._others:
            text = "%s: %d frozen tensors are those of the run, as their digests say"
            logger.info(text, self._where, len(self.keys) - len(unknown))
            return None
        first = min(self._others)
        fact = (
            f"the base model is another one: {len(self._others)} of {len(self.keys)} frozen tensors differ, first "
            f"'{first}', and checkpoint.save.frozen=skip has stored none of them"
        )
        return Misfit(first, fact, "build the model from the base that the run had, or name the tensors in ignore")


def together(messages: Sequence[FrozenMessage | None]) -> FrozenMessage:
    """On the leading rank: what all ranks have told, together."""
    parts: Digests = {}
    others: dict[str, None] = {}
    for own, differing in filter(None, messages):
        others.update(dict.fromkeys(differing))
        for key, digests in own.items():
            parts.setdefault(key, {}).update(digests)
    return parts, [*others]


def _whole(digests: Mapping[str, str]) -> int:
    """The digest of the whole tensor, from those of its parts."""
    whole = digests.get("")
    return add_up([int(digest, 16) for digest in (digests.values() if whole is None else [whole])])


def _place(part: FrozenPart) -> str:
    return "" if part.region is None else " ".join(",".join(map(str, each)) for each in part.region)
