"""`load_weights`: the weights of a model alone, to evaluate or fine-tune it. Writes nothing and starts no process."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..core.commit.names import step_in_name
from ..core.coordination import Coordinator, LocalCoordinator, RankStore, StoreCoordinator
from ..core.options import ResolvedTimeouts
from ..core.progress import Progress, no_progress, progress_bar
from ..core.spelling import closest
from ..core.storage.locate import may_have_memory, path_text, storage_at
from ..errors import CheckpointLoadError, CheckpointTypeError, first_keys, missing_keys
from ..formats.checkpoints import FoundCheckpoint, find_checkpoint
from ..formats.source import Source
from ..loading.collective import CollectiveLoad, CollectiveLoads, Phase, SharedReads
from ..loading.meta_tensors import checked_device
from ..loading.object_state import load_state
from ..loading.reader import Reader, shares_host
from ..state.key_map import names_above
from ..state.shards import parts_of
from ..state.wrapped_modules import canonical_state_of, without_wrappers

logger = logging.getLogger("ckpt_component.readers")

#: How many names of the checkpoint an error shows.
_MOST_NAMES = 10


def load_weights(
    model: torch.nn.Module | dict[str, Any],
    path: str | os.PathLike[str],
    *,
    key: str = "model",
    strict: bool = True,
    allow_unexpected: bool | None = None,
    rename: Mapping[str, str] | None = None,
    prefix: str = "",
    ignore: Sequence[str] = (),
    allow_dtype_cast: bool = False,
    alone: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> int | None:
    """Load the weights of a model from a checkpoint of any supported format, for evaluation and fine-tuning.

    Only reads: it builds no manager, starts no process, writes no file, and takes no folder over. With several ranks,
    all of them call it, and each loads its part of sharded tensors; it returns, or raises an error, on all of them.

    Args:
        model: the module, or a dict of tensors, whose tensors are copied into
        path: a checkpoint, a folder or a file; or a folder of checkpoints, for the newest, and `FOLDER@300` and
            `FOLDER@best` for others
        key: where the checkpoint has the weights: the key of the model in the saved state; with dots for a nested one.
            Empty: it is a bare state dict, as files of Hugging Face are.
        strict: raise if the checkpoint lacks keys of the model; False: these values stay as they are, with a warning
        allow_unexpected: leave weights under `key` that the model lacks; False: raise. None: as `strict` says, so that
            `strict=False` takes what fits.
        rename: as for `Checkpointer.load` of `{key: model}`: whole names in the checkpoint -> in that target, such as
            `{"model.encoder": "model"}`
        prefix: as for `Checkpointer.load` of `{key: model}`: name to put before all keys, after the renames
        ignore: as for `Checkpointer.load` of `{key: model}`: names that are not loaded, such as `["model.head"]`
        allow_dtype_cast: let tensors take values of another dtype
        alone: this rank loads for itself, even if `torch.distributed` has more ranks
        storage_options: `checkpoint.storage.options`, for a checkpoint in a bucket
        device: where a model on the meta device gets memory, as `checkpoint.load.device`

    Returns:
        The step of the checkpoint, from its name; None if that has none.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint
        CheckpointLoadError: the checkpoint has nothing under `key`, or values have another shape or dtype; nothing was
            loaded. MissingKeysError and UnexpectedKeysError: keys differ.
        CheckpointCorruptError: the bytes on disk differ from those that were written. No older checkpoint is tried.
        CheckpointTypeError: `model` is neither a module nor a dict, or `key` is not a name
        CheckpointConfigError: `device` is not a device with memory
        CheckpointError: with its rank in the text: another rank could not load; of the same type where it is one of
            CheckpointCorruptError, CheckpointNotFoundError and CheckpointLoadError
        RanksError, CheckpointTimeoutError: other ranks did not call this, or are dead
    """
    if not isinstance(model, (torch.nn.Module, dict)):
        raise CheckpointTypeError(
            f"load_weights() fills a module or a dict of tensors; pass one instead of a {type(model).__name__}."
        )
    for name, value in {} if isinstance(model, torch.nn.Module) else model.items():
        if isinstance(value, torch.nn.Module):
            raise CheckpointTypeError(
                f"load_weights() fills one module; pass the {type(value).__name__} at {name!r}, not the dict around it."
            )
    if not isinstance(key, str):
        raise CheckpointTypeError(f"key is {key!r:.100}; pass a name such as 'model', or '' for a bare state dict.")
    given = checked_device("device", device)
    text, timeouts = path_text(path), ResolvedTimeouts()
    with contextlib.ExitStack() as until_closed:
        ranks = until_closed.enter_context(contextlib.closing(_ranks_of_call(alone, timeouts)))
        load: CollectiveLoad | None = None
        phase: Phase = contextlib.nullcontext
        if ranks.world_size > 1:
            loads = until_closed.enter_context(contextlib.closing(CollectiveLoads(ranks, timeouts, read_once)))
            load = loads.load(text, name="load_weights")
            phase = load.phase
        with phase("find"):
            checkpoint = find_checkpoint(text, storage_options)
        found, step = checkpoint.path, _step_of(checkpoint)
        if checkpoint.root is not None:  # of a folder of checkpoints rank 0 chooses: a run may commit another one
            deadline = ranks.outside.now() + timeouts.stage
            found, step = ranks.run_on_leader("load_weights/choice", lambda: [found, step], deadline)
        reader = _reader_class()(
            ranks.rank,
            ranks.world_size,
            shared=shares_host(ranks.world_size),
            storage_of=partial(storage_at, options=storage_options),
            progress=progress_of(ranks),
            device=given,
        )
        with phase("read"):
            if isinstance(model, torch.nn.Module):
                state, own_state = canonical_state_of(model)
            else:
                state = model
            target = state
            for name in reversed(key.split(".") if key else []):
                target = {name: target}
            _, missing = reader.read(
                found,
                target,
                strict=strict,
                allow_unexpected=not strict if allow_unexpected is None else allow_unexpected,
                allow_dtype_cast=allow_dtype_cast,
                part_of=load,
                modules=[model] if isinstance(model, torch.nn.Module) else [],
                rename=rename,
                prefix=prefix,
                ignore=ignore,
                narrow=partial(_weights_of, key=key, wanted=[*_names_in(state)], renamed=bool(rename or prefix)),
            )
        if missing:
            logger.warning("Checkpoint at %s %s; these values are left as they are", found, missing_keys(missing))
        with phase("take"):
            if isinstance(model, torch.nn.Module):
                # Beside the tensors, which are filled, it may have state that it takes itself.
                load_state(model, partial(own_state, state), "", found)
    return step


def progress_of(ranks: Coordinator) -> Progress:
    """What follows the bytes: the terminal, of the one rank that has it."""
    # Ranks that save or load alone lead themselves; the terminal is that of all.
    return progress_bar if ranks.is_leader and os.environ.get("RANK", "0") == "0" else no_progress


def _reader_class() -> type[Reader]:
    """The reader, which looks into the memory of this host if there may be any."""
    if not may_have_memory():
        return Reader
    from ..hosts.snapshot_source import NearestReader

    return NearestReader


def read_once(ranks: Coordinator, timeouts: ResolvedTimeouts) -> SharedReads:
    """What lets the ranks of several hosts read together."""
    from ..hosts.share import ReadOnce  # which loads on one host need not wait for

    return ReadOnce(ranks, timeouts)


def _ranks_of_call(alone: bool, timeouts: ResolvedTimeouts) -> Coordinator:
    """The ranks of one call, to be closed after it."""
    store = None if alone else RankStore.of_job("load_weights")
    return LocalCoordinator() if store is None else StoreCoordinator(store, timeouts.heartbeat, timeouts.stall)


def _step_of(checkpoint: FoundCheckpoint) -> int | None:
    """The step of a checkpoint, from its name or that of the folder around its file."""
    if checkpoint.step is None and not checkpoint.fs.is_folder(checkpoint.path):
        return step_in_name(os.path.basename(os.path.dirname(checkpoint.path)))
    return checkpoint.step


def _weights_of(source: Source, *, key: str, wanted: Sequence[str], renamed: bool) -> Source:
    """The weights in a checkpoint.

    Args:
        source: the checkpoint
        key: where it has them
        wanted: the names of the model's values
        renamed: whether the checkpoint has them under other names

    Raises:
        CheckpointLoadError: it has nothing there, or they are somewhere else; says what it has
    """
    part = copy.copy(source)
    plain = {*map(without_wrappers, wanted)}
    for place in dict.fromkeys((key, without_wrappers(key))):  # the part of a wrapper may be in the key alone
        part.contents = source.contents.below(place)
        known = {name[len(place) :].removeprefix(".") for name, _ in part.contents.paths()}
        if known and (renamed or not plain.isdisjoint(map(without_wrappers, known))):
            return part
    names = [name for name, _ in source.contents.paths()]
    likely = _likely_keys(names, wanted)
    if not known or likely:
        tops = names if likely == [""] else [*dict.fromkeys(name.partition(".")[0] for name in names)]
        near = closest(key, likely)
        guesses = [f"key={name!r}" for name in ([near] if near else likely)]
        advice = f"pass {' or '.join(guesses)}" if guesses else "pass key= with the name of its weights"
        where = f"under key={key!r}" if key else "at the top"
        what = f"none of the model's keys {where}" if known else f"nothing {where}"
        raise CheckpointLoadError(
            f"{source.where} has {what}; it has {first_keys(tops, _MOST_NAMES)}. To load its weights, {advice}."
        )
    return part


def _likely_keys(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The names below which a checkpoint has most of the wanted names, the shortest first."""
    names, counts = {*wanted}, Counter[str]()
    for key in known:
        for above in ("", *names_above(key)):
            if key[len(above) :].removeprefix(".") in names:
                counts[above] += 1
    most = max(counts.values(), default=0)
    return sorted((name for name, count in counts.items() if count == most), key=len)


def _names_in(state: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    """The names of all values in nested dicts, and of what tensors are made of."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _names_in(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"
            if isinstance(value, torch.Tensor):
                yield from (f"{above}{key}.{name}" for name in parts_of(value))
