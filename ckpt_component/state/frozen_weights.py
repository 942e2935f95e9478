"""`checkpoint.save.frozen=skip`: parameters that need no gradient are not stored, but a digest of each is.

The script makes them again, from the base model. So a parameter is left out only while it has the values that the
script made: what was trained, or came from a checkpoint that has other values, stays in the checkpoint, frozen or not.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..core.outside import OUTSIDE
from ..errors import first_keys
from .digests import digest_of_part
from .flatten import FlatState
from .paths import FROZEN, Path, key_of, rank_name
from .shards import is_spread
from .unchanged_tensors import mark_of
from .wrapped_modules import WRAPPER_MARKS, CanonicalNames, parts_of_parameters

logger = logging.getLogger("ckpt_component.state")


class FrozenPart(NamedTuple):
    """What a rank has of a frozen tensor, for those who compare it with another one.

    Attributes:
        key: the key of the tensor
        dtype: its dtype, such as `torch.uint8`
        shape: the shape of the whole tensor
        region: offsets and sizes of the part in it; None: it is the whole
        digest: the part's digest, in hexadecimal
    """

    key: str
    dtype: str
    shape: Sequence[int]
    region: Sequence[Sequence[int]] | None
    digest: str


class _FrozenParameter(NamedTuple):
    """A frozen parameter in a state: the parameter, and the paths of its value and of what says how to read it."""

    parameter: torch.Tensor
    paths: list[Path]


class _AsBuilt(NamedTuple):
    """What is known of a frozen parameter: its parts as the script has made them, and the marks of its tensors."""

    parameter: weakref.ref[torch.Tensor]
    mark: Any
    parts: list[FrozenPart]


class FrozenWeights:
    """Leaves frozen parameters out of states that are saved, one after the other. For the training thread.

    Args:
        rank: this rank
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._known: dict[Path, _AsBuilt] = {}
        #: Paths of all tensors that were in a state. What was one of them and is frozen later, was trained.
        self._seen: set[Path] = set()
        self._stored: set[Path] = set()
        #: The parts that were left out last, and what was stored for them, by path.
        self._left_out: list[list[FrozenPart]] = []
        self._records: dict[Path, str] = {}
        self._is_first = True

    def built(self, flat: FlatState, parts: Mapping[Path, list[FrozenPart]]) -> None:
        """Note which frozen parameters a script has made, before a load fills some of them.

        Args:
            flat: the target
            parts: what is known of the tensors at some paths
        """
        new = {path: weight for path, weight in frozen_in(flat).items() if path not in self._seen}
        self._known.update(_look(flat, new, parts))
        self._seen.update(flat.tensor_paths, flat.elsewhere)

    def filled(self, keys: Iterable[str]) -> None:
        """Tensors were filled by a load, which their marks need not show."""
        filled = {*keys}
        for path, known in self._known.items():
            if any(part.key in filled for part in known.parts):
                self._known[path] = known._replace(mark=None)

    def kept(self, flat: FlatState, modules: Sequence[Path]) -> None:
        """Modules were given the values that they had, which changes the marks of the parameters alone.

        Args:
            flat: the target
            modules: paths of the modules, whose state torch's code takes
        """
        numbers = _numbers_by_path(flat)
        for path, known in self._known.items():
            if known.mark is not None and path[:-1] in modules:
                self._known[path] = known._replace(mark=_mark(flat, numbers[path]))

    def leave_out(self, flat: FlatState) -> FlatState:
        """A state without the frozen parameters that have the values that the script made, and with their digests."""
        self.built(flat, {})
        weights = frozen_in(flat)
        if self._is_first and not weights:
            logger.warning(
                "checkpoint.save.frozen=skip leaves nothing out: no module in the state has a parameter that needs no "
                "gradient; pass the module itself, not its state_dict(), and freeze it before the first save"
            )
        self._is_first = False
        numbers = _numbers_by_path(flat)
        changed = [
            path
            for path, weight in weights.items()
            if path not in self._stored
            and (known := self._known.get(path)) is not None
            and (known.parameter() is not weight.parameter or known.mark != _mark(flat, numbers[path]))
        ]
        # What a load has filled of a sharded parameter may differ on some ranks only, which must all decide alike.
        stored = [path for path in changed if self._known[path].mark is None and is_spread(weights[path].parameter)]
        unsure = {path: weights[path] for path in changed if path not in stored}
        for path, now in _look(flat, unsure, {}).items():
            if now.parts == self._known[path].parts:
                self._known[path] = now
            else:
                stored.append(path)
        stored += [path for path in weights if path not in self._known and path not in self._stored]
        self._stored.update(stored)
        if stored:
            logger.warning(
                "checkpoint.save.frozen=skip: %d frozen parameters are stored, because the script does not make them "
                "with the values that they have: %s",
                len(stored),
                first_keys([*map(key_of, stored)]),
            )
        left_out = {path: weights[path] for path in weights if path in self._known and path not in self._stored}
        gone = {path for weight in left_out.values() for path in weight.paths}
        flat = flat.only(lambda path: path not in gone) if gone else flat
        parts = [self._known[path].parts for path in left_out]
        if parts != self._left_out:
            self._left_out, self._records = parts, self._encoded(left_out)
        flat.object_paths += self._records
        flat.objects += self._records.values()
        return flat

    def _encoded(self, left_out: Mapping[Path, _FrozenParameter]) -> dict[Path, str]:
        """What is stored for the parameters that are left out, by path; of sharded ones, what each rank has."""
        records = defaultdict[Path, list[FrozenPart]](list)
        spread = {path[:-1] for path, weight in left_out.items() if is_spread(weight.parameter)}
        for path in left_out:
            place = (*path[:-1], FROZEN)
            records[(*place, rank_name(self._rank)) if path[:-1] in spread else place] += self._known[path].parts
        return {path: json.dumps({"tensors": parts}) for path, parts in records.items()}


def frozen_in(flat: FlatState) -> dict[Path, _FrozenParameter]:
    """The parameters of modules in a state that need no gradient, and that no optimizer in it has stepped, by path.

    On the meta device they have no values that a script would make again.
    """
    optimizers = [each for _, each in flat.stateful if isinstance(each, torch.optim.Optimizer)]
    trained = {id(parameter) for optimizer in optimizers for parameter in optimizer.state}
    present, found = {*flat.tensor_paths, *flat.elsewhere}, dict[Path, _FrozenParameter]()
    for above, module in flat.stateful:
        if not isinstance(module, torch.nn.Module):
            continue
        parameters = dict(module.named_parameters(remove_duplicate=False))
        frozen = {
            name: each
            for name, each in parameters.items()
            if not each.requires_grad and id(each) not in trained and not each.is_meta
        }
        text, names = "\n".join(frozen), {name: name for name in frozen}
        if any(map(text.__contains__, WRAPPER_MARKS)):
            names = CanonicalNames(module, parameters).of
        depth, parts = len(above), dict[str, list[str]]()
        if above in flat.quantized:
            below = [path[depth] for path in present if len(path) == depth + 1 and path[:depth] == above]
            parts = parts_of_parameters(below)
        for name, parameter in frozen.items():
            path = (*above, names[name])
            if path in present:
                found[path] = _FrozenParameter(
                    parameter, [path, *((*above, part) for part in parts.get(names[name], ()))]
                )
    return found


def _look(
    flat: FlatState, weights: Mapping[Path, _FrozenParameter], parts: Mapping[Path, list[FrozenPart]]
) -> dict[Path, _AsBuilt]:
    """Look at frozen parameters of a state; `parts` are known already."""
    numbers = _numbers_by_path(flat)
    found = {
        **parts,
        **parts_at(flat, [each for weight in weights.values() for each in weight.paths if each not in parts]),
    }
    return {
        path: _AsBuilt(
            weakref.ref(weight.parameter),
            _mark(flat, numbers[path]),
            [part for each in weight.paths for part in found[each]],
        )
        for path, weight in weights.items()
    }


def parts_at(flat: FlatState, paths: Sequence[Path]) -> dict[Path, list[FrozenPart]]:
    """What this rank has of the tensors at some paths of a state. Reads all their bytes."""
    if not paths:
        return {}
    numbers = _numbers_by_path(flat)
    wanted = [(path, number) for path in paths for number in numbers[path]]

    def digest(number: int) -> str:
        with torch.inference_mode(False), torch.no_grad():
            return f"{digest_of_part(flat.tensors[number], flat.shards[number]):016x}"

    with OUTSIDE.pool(torch.get_num_threads(), "ckpt-hash") as threads:
        digests = [*threads.map(digest, [number for _, number in wanted])]
    found: dict[Path, list[FrozenPart]] = {path: [] for path in paths}
    for (path, number), each in zip(wanted, digests, strict=True):
        tensor, shard = flat.tensors[number], flat.shards[number]
        whole, region = tensor.shape, None
        if shard is not None:
            whole, region = shard.shape, [[*shard.offsets], [*tensor.shape]]
        found[path].append(FrozenPart(key_of(path), str(tensor.dtype), [*whole], region, each))
    return found


def read_record(value: Any) -> list[FrozenPart]:
    """What a checkpoint has for parameters that were left out.

    Raises:
        ValueError: it is something else
    """
    try:
        parts = [FrozenPart(*row) for row in json.loads(value)["tensors"]]
        return [
            FrozenPart(
                str(part.key),
                str(part.dtype),
                [*part.shape],
                None if part.region is None else [*map(list, part.region)],
                f"{int(part.digest, 16):016x}",
            )
            for part in parts
        ]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{value!r:.60} is no record of frozen tensors") from error


def _numbers_by_path(flat: FlatState) -> dict[Path, list[int]]:
    numbers = defaultdict[Path, list[int]](list)
    for number, path in enumerate(flat.tensor_paths):
        numbers[path].append(number)
    return numbers


def _mark(flat: FlatState, numbers: Sequence[int]) -> list[Any]:
    return [mark_of(flat.tensors[number]) for number in numbers]
