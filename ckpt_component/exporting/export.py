"""Export a checkpoint: stream its tensors into files in a hidden folder beside the target, then rename them to it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..catalogue import open_catalogue
from ..errors import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointSaveError,
    first_keys,
)
from ..progress import Progress, no_progress
from ..spelling import invalid_choice
from ..storage.checksum import find_checksum
from ..storage.cleanup import discard, sweep_attempts
from ..storage.fs import FsOps
from ..storage.liveness import AttemptLock
from ..storage.names import Attempt, new_token, trash_path
from ..storage.space import FULL, full_text, refuse_without_room
from .blocks import TensorBlocks, open_blocks
from .casting import caster, check_dtype
from .files import File, safetensors_file
from .hugging_face import CONFIG, INDEX, WEIGHTS, hugging_face_files, small_files
from .selection import Selection, model_prefix, select
from .torch_file import pickle_of, torch_file

logger = logging.getLogger(__name__)

FORMATS = ("hf", "safetensors", "torch")
MAX_SHARD_BYTES = 5_000_000_000
#: So often the disk is made to begin with what was written.
_FLUSH_BYTES = 32 << 20


@dataclass(frozen=True)
class ExportOptions:
    """How to export.

    Attributes:
        format: `hf`: a folder of safetensors files that `from_pretrained` reads; `safetensors` or `torch`: one file.
        selection: Which tensors, and their names. For `hf` without one, those of the model, if the state has one.
        dtype: Convert floating-point tensors to this dtype; None: as they are.
        max_shard_bytes: The most bytes of tensors in a file of `hf`.
        config_from: A folder whose config and tokenizer files are copied into the folder of `hf`; empty: none.
        replace: Replace an export that exists.
    """

    format: str
    selection: Selection = field(default_factory=Selection)
    dtype: str | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    config_from: str = ""
    replace: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise CheckpointConfigError(invalid_choice("format", self.format, FORMATS))
        check_dtype("dtype", self.dtype)
        if self.config_from and self.format != "hf":
            raise CheckpointConfigError(
                f"config_from={self.config_from} is for the format hf, and this is {self.format}."
            )


class Exported(NamedTuple):
    """A finished export.

    Attributes:
        path: Where it is.
        files: Names of its files; of a single file, its own.
        tensors: Number of tensors that are stored.
        nbytes: Bytes of them.
        seconds: How long it took.
        tied: Names that are not in the files of `hf` and `safetensors`, with the names of what they are tied to.
        left_out: Keys of objects that the format cannot hold.
        has_config: Whether there is a config.json.
    """

    path: str
    files: list[str]
    tensors: int
    nbytes: int
    seconds: float
    tied: dict[str, str]
    left_out: list[str]
    has_config: bool


def export_checkpoint(
    source: str, target: str, options: ExportOptions, fs: FsOps, progress: Progress = no_progress
) -> Exported:
    """Export a checkpoint. The target appears whole or not at all; checksums are verified on the way.

    Args:
        source: Path of the checkpoint.
        target: Path of the export.
        options: How.
        fs: The file system.
        progress: Follows the bytes of the tensors.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointExistsError: The target exists.
        CheckpointLoadError: A name fits no key, or the format does not have a dtype.
        CheckpointCorruptError: The checkpoint is damaged.
        CheckpointSaveError: The files cannot be written.
    """
    started = time.perf_counter()
    target = os.path.abspath(target)
    refuse_target(fs, target, options)
    catalogue = open_catalogue(source)
    selection = options.selection
    if options.format == "hf" and not selection.prefix and not selection.keys:
        selection = Selection(model_prefix(catalogue), rename=selection.rename)
        if selection.prefix:
            logger.info("exporting what is below '%s' (--prefix); --keys '*' exports everything", selection.prefix)
    selected = select(catalogue, selection, options.dtype)
    tensors = [tensor.entry for tensor in selected.tensors]
    stored = [entry for _, entry in selected.objects] if options.format == "torch" else []
    with open_blocks(catalogue, tensors, stored) as blocks:
        left_out = [entry.key for _, entry in selected.objects]
        small: dict[str, bytes] = {}
        if options.format == "torch":
            pickles = [
                (path, entry, pickle_of(blocks.item(entry), f"'{entry.key}'")) for path, entry in selected.objects
            ]
            left_out = [entry.key for _, entry, data in pickles if data is None]
            objects = [(path, data) for path, _, data in pickles if data is not None]
            files = [torch_file(os.path.basename(target), selected.tensors, objects, selected.containers)]
        elif options.format == "safetensors":
            files = [safetensors_file(os.path.basename(target), selected.tensors)]
        else:
            files, index = hugging_face_files(selected.tensors, options.max_shard_bytes)
            small = {**small_files(fs, options.config_from, options.dtype), **index}
        if left_out:
            kind = "tensors inside objects" if options.format == "torch" else "objects"
            text = "%s: %d value(s) are left out, because files of %s have no %s: %s"
            logger.warning(text, source, len(left_out), options.format, kind, first_keys(left_out, 5))
        nbytes = sum(tensor.nbytes for tensor in selected.tensors)
        with (
            _typed_errors(fs, target, nbytes),
            progress(f"exporting {os.path.basename(catalogue.path)}", nbytes) as done,
        ):
            _write(fs, target, options, files, small, blocks, done)
    return Exported(
        target,
        [file.name for file in files] + list(small),
        len(selected.tensors),
        nbytes,
        time.perf_counter() - started,
        {} if options.format == "torch" else {key: each.name for each in selected.tensors for key, _ in each.tied},
        left_out,
        CONFIG in small,
    )


def refuse_target(fs: FsOps, target: str, options: ExportOptions) -> None:
    """Refuse a target that exists, unless it is an export of the same form that may be replaced.

    Raises:
        CheckpointExistsError: It exists.
    """
    if not os.path.lexists(target):
        return
    if not options.replace:
        raise CheckpointExistsError(f"{target} already exists; export to another path, or replace it with --replace.")
    if options.format != "hf":
        if fs.size(target) is None:
            raise CheckpointExistsError(f"{target} is not a file, so a file does not replace it; name another path.")
        return
    names = fs.names(target) if fs.is_real_folder(target) else []
    weights = any(name in (INDEX, f"{WEIGHTS}.safetensors") for name in names)
    if not weights or "manifest.json" in names or any(fs.is_folder(os.path.join(target, name)) for name in names):
        raise CheckpointExistsError(
            f"{target} is not an export of hf, so it is not replaced; name another path, or delete it yourself."
        )


def _write(
    fs: FsOps,
    target: str,
    options: ExportOptions,
    files: Sequence[File],
    small: Mapping[str, bytes],
    blocks: TensorBlocks,
    done: Any,
) -> None:
    """Write all files in a staging folder, and commit them."""
    parent, name = os.path.split(target)
    folder = options.format == "hf"
    fs.make_folders(parent)
    sweep_attempts(fs, target)
    size = sum(file.end for file in files) + sum(map(len, small.values()))
    refuse_without_room(fs, target, size, 0)
    attempt = Attempt(target, new_token(), file="" if folder else name)
    fs.make_folder(attempt.staging)
    lock = AttemptLock(fs, attempt)
    try:
        for file in files:
            _write_file(fs, os.path.join(attempt.staging, file.name), file, blocks, done)
        for small_name, data in small.items():
            fs.write_new(os.path.join(attempt.staging, small_name), data)
        fs.sync_folder(attempt.staging)
        _commit(fs, attempt, replace=options.replace)
    except BaseException:
        if fs.is_folder(attempt.staging):
            discard(fs, attempt.staging)
        raise
    finally:
        lock.close()


def _commit(fs: FsOps, attempt: Attempt, *, replace: bool) -> None:
    """Give the files their name in one step. What was there is gone afterwards."""
    target, staging = attempt.target, attempt.staging
    source = os.path.join(staging, attempt.file) if attempt.file else staging
    old = ""
    if not replace or not os.path.lexists(target):
        try:
            fs.rename_new(source, target)
        except FileExistsError as error:
            raise CheckpointExistsError(f"{target} was created in the meantime; this export was given up.") from error
    elif attempt.file:
        fs.replace(source, target)
    else:
        old = trash_path(target)
        fs.exchange(staging, target)
        fs.rename_new(staging, old)
    fs.sync_folder(os.path.dirname(target))
    if attempt.file:
        fs.remove_folder(staging)
    elif old:
        fs.remove_tree(old)


def _write_file(fs: FsOps, path: str, file: File, blocks: TensorBlocks, done: Any) -> None:
    checksum = find_checksum("crc32")
    sums, flushed = [], 0
    fd = fs.create(path, file.end)
    try:
        for position, data in file.constants:
            fs.write(fd, [memoryview(data)], position)
        for tensor, start in file.places:
            cast, crc, position = caster(tensor.entry.dtype, tensor.dtype), checksum.stream(), start
            for block in blocks.of(tensor.entry):
                converted = block if cast is None else cast(block)
                if file.closing is not None:
                    crc.update(converted)
                fs.write(fd, [converted], position)
                position += len(converted)
                done(len(converted))
            if position - flushed >= _FLUSH_BYTES:
                fs.start_writeback(fd, flushed, position - flushed)
                flushed = position
            sums.append(crc.value())
        if file.closing is not None:
            fs.write(fd, [memoryview(file.closing(sums))], file.end)
        fs.sync(fd)
        fs.drop_cached(fd)
    finally:
        fs.close(fd)


@contextmanager
def _typed_errors(fs: FsOps, target: str, nbytes: int) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        advice = full_text(fs, target, nbytes, error.errno) if error.errno in FULL else ""
        raise CheckpointSaveError(f"{target} could not be written: {error}. {advice}".rstrip(), error.errno) from error
