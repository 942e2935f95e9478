"""Export a checkpoint: stream its tensors into files in a hidden folder beside the target, then rename them to it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from ..core.commit.cleanup import discard, sweep_attempts
from ..core.commit.commit import new_attempt
from ..core.commit.liveness import AttemptLock
from ..core.commit.manifest import checkpoint_around
from ..core.commit.names import MANIFEST, SINGLE_FILES
from ..core.progress import Progress, no_progress
from ..core.spelling import invalid_choice
from ..core.storage.files import FileStorage
from ..core.storage.locate import storage_at
from ..core.storage.new_names import new_token
from ..core.storage.safe_open import place_of, read_failure
from ..core.storage.space import FULL, full_text, refuse_without_room
from ..core.storage.storage import Storage
from ..errors import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointLoadError,
    CheckpointSaveError,
    first_keys,
)
from ..formats import Entry, Index, open_index
from ..state.key_map import KeyMap
from .blocks import TensorBlocks, check_dtype
from .export_files import (
    INDEX,
    WEIGHTS,
    File,
    Selected,
    hugging_face_files,
    model_prefix,
    safetensors_file,
    select,
    stream_file,
    tensor_bytes_of,
)

CONFIG = "config.json"
#: The small files that are copied; not indexes of weights, and nothing that a checkpoint has besides.
_COPIED = re.compile(
    r"(?!\.|manifest|run\.|integrity-|trainer_state)(?!.*\.index\.json).*\.(json|txt|model|jinja|tiktoken)"
)
_MOST_SMALL = 256 << 20


def small_files(fs: Storage, folder: str, dtype: str | None) -> dict[str, bytes]:
    """The config and tokenizer files of a Hugging Face folder; the config with the dtype of the export.

    Raises:
        CheckpointLoadError: there is no config.json
    """
    names = list(filter(_COPIED.fullmatch, fs.names(folder)))
    if CONFIG not in names:
        raise CheckpointLoadError(
            f"{folder} has no {CONFIG}; name a Hugging Face folder, with its config and tokenizer."
        )
    files = {}
    for name in names:
        path = os.path.join(*place_of(folder, name))
        try:
            files[name] = fs.read(path, _MOST_SMALL)
        except OSError as error:
            raise read_failure(path, error) from error
    if dtype is not None:
        try:
            config = json.loads(files[CONFIG])
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        except (ValueError, TypeError) as error:
            raise CheckpointLoadError(
                f"{os.path.join(folder, CONFIG)} is not the config of a model: {error}."
            ) from error
        files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return files


logger = logging.getLogger(__name__)

FORMATS = ("hf", "safetensors", "torch")
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportOptions:
    """How to export.

    Attributes:
        format: `hf`: a folder of safetensors files that `from_pretrained` reads; `safetensors` or `torch`: one file
        prefix: only what is below this name, which is taken away; None: for `hf` the model, if the state has one
        rename: as for `KeyMap`, after the prefix was taken away
        ignore: as for `KeyMap`, after the prefix was taken away
        dtype: convert floating-point tensors to this dtype; None: as they are
        max_shard_bytes: the most bytes of tensors in a file of `hf`
        config_from: a folder whose config and tokenizer files are copied into the folder of `hf`; empty: none
        replace: replace an export that exists
    """

    format: str
    prefix: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    dtype: str | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    config_from: str = ""
    replace: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise CheckpointConfigError(invalid_choice("format", self.format, FORMATS, form="{1}"))
        check_dtype("dtype", self.dtype)
        if self.config_from and self.format != "hf":
            raise CheckpointConfigError(
                f"config_from={self.config_from} is for the format hf, and this is {self.format}."
            )


class Exported(NamedTuple):
    """A finished export.

    Attributes:
        path: where it is
        files: names of its files; of a single file, its own
        tensors: number of tensors that are stored
        nbytes: bytes of them
        seconds: how long it took
        tied: names that are not in the files of `hf` and `safetensors`, with the names of what they are tied to
        left_out: keys of objects that the format cannot hold
    """

    path: str
    files: list[str]
    tensors: int
    nbytes: int
    seconds: float
    tied: dict[str, str]
    left_out: list[str]


def export_checkpoint(
    source: str,
    target: str,
    options: ExportOptions,
    fs: FileStorage,
    progress: Progress = no_progress,
    storage: Storage | None = None,
) -> Exported:
    """Export a checkpoint. The target appears whole or not at all; checksums are verified on the way.

    Args:
        source: path of the checkpoint
        target: path of the export
        options: how
        fs: the file system of the export
        progress: follows the bytes of the tensors
        storage: the storage of the checkpoint; None: that of its path, without options

    Raises:
        CheckpointNotFoundError: there is no checkpoint
        CheckpointExistsError: the target exists
        CheckpointLoadError: a name fits no key, or the checkpoint lacks frozen parameters that `hf` must have
        CheckpointStageError: the format does not have a dtype or a name
        CheckpointCorruptError: the checkpoint is damaged
        CheckpointSaveError: the files cannot be written
    """
    started = perf_counter()
    target = os.path.abspath(target)
    _refuse_target(fs, target, options)
    index = open_index(storage or storage_at(source), source)
    selected = selected_by(options, index)
    if selected.lacks_frozen:
        lacks = f"{source} does not have the frozen parameters, which checkpoint.save.frozen=skip left out"
        if options.format == "hf":
            text = "which an export of hf is to have for from_pretrained(); export the others as safetensors or torch"
            raise CheckpointLoadError(f"{lacks}, and {text}.")
        logger.warning("%s; the export has the others", lacks)
    tensors, name = selected.tensors, os.path.basename(target)
    with open_blocks(index, [tensor.entry for tensor in tensors]) as blocks:
        left_out = [entry.key for _, entry in selected.objects]
        small: dict[str, bytes] = {}
        if options.format == "torch":
            from .loaded import torch_file  # needs torch

            file, left_out = torch_file(name, index, selected)
            files = [file]
        elif options.format == "safetensors":
            files = [safetensors_file(name, tensors)]
        else:
            small = small_files(fs, options.config_from, options.dtype) if options.config_from else {}
            files, small_index = hugging_face_files(tensors, options.max_shard_bytes)
            small |= small_index
        if left_out:
            text = "%s: %d value(s) are objects that files of %s do not have, and are left out: %s"
            logger.warning(text, source, len(left_out), options.format, first_keys(left_out, 5))
        nbytes = sum(tensor.nbytes for tensor in tensors)
        try:
            with progress(f"exporting {os.path.basename(index.path)}", nbytes) as done:
                _write(fs, target, options, files, small, blocks, done)
        except CheckpointError:
            raise
        except OSError as error:
            advice = full_text(fs, target, nbytes, error.errno) if error.errno in FULL else ""
            text = f"{target} could not be written: {error}. {advice}".rstrip()
            raise CheckpointSaveError(text, error.errno) from error
    tied = {} if options.format == "torch" else {key: each.name for each in tensors for key, _ in each.tied}
    names = [*(file.name for file in files), *small]
    return Exported(target, names, len(tensors), nbytes, perf_counter() - started, tied, left_out)


def selected_by(options: ExportOptions, index: Index) -> Selected:
    """What an export with these options has of a checkpoint.

    Raises:
        CheckpointLoadError: a name fits no key
    """
    prefix = options.prefix
    if prefix is None:
        prefix = model_prefix(index) if options.format == "hf" else ""
        if prefix:
            logger.info("exporting what is below '%s'; --prefix '' exports everything", prefix)
    return select(index, prefix, KeyMap(options.rename, ignore=options.ignore), options.dtype)


def _refuse_target(fs: FileStorage, target: str, options: ExportOptions) -> None:
    """Refuse a target in a checkpoint, and one that exists, unless it is an export of the same form to be replaced.

    Raises:
        CheckpointExistsError: it exists, or lies in a checkpoint
    """
    checkpoint = checkpoint_around(fs, os.path.dirname(target))
    if checkpoint is not None:
        raise CheckpointExistsError(f"{target} is in the checkpoint {checkpoint}, which does not change; name another.")
    if not os.path.lexists(target):
        return
    if not options.replace:
        raise CheckpointExistsError(f"{target} already exists; export to another path, or replace it with --replace.")
    if options.format == "hf":
        names = fs.names(target) if fs.is_real_folder(target) else []
        alike = INDEX in names or f"{WEIGHTS}.safetensors" in names
        alike = alike and not any(name == MANIFEST or fs.is_folder(os.path.join(target, name)) for name in names)
    else:
        alike = fs.size(target) is not None and target.endswith(SINGLE_FILES)
    if not alike:
        raise CheckpointExistsError(
            f"{target} is not an export of {options.format}, so it is not replaced; name another path, or delete it "
            "yourself."
        )


def _write(
    fs: FileStorage,
    target: str,
    options: ExportOptions,
    files: Sequence[File],
    small: Mapping[str, bytes],
    blocks: TensorBlocks,
    done: Any,
) -> None:
    """Write all files in a staging folder, and give them their name in one step."""
    parent, name = os.path.split(target)
    fs.make_folders(parent)
    sweep_attempts(fs, target)
    refuse_without_room(fs, target, sum(file.size for file in files) + sum(map(len, small.values())), 0)
    attempt = new_attempt(fs, target, new_token(fs.outside), file="" if options.format == "hf" else name)
    fs.make_folder(attempt.staging)
    lock = AttemptLock(fs, attempt)
    try:
        for file in files:
            path = os.path.join(attempt.staging, file.name)
            stream_file(fs, path, file, partial(tensor_bytes_of, blocks), done)
        for small_name, data in small.items():
            fs.write_new(os.path.join(attempt.staging, small_name), data)
        fs.sync_folder(attempt.staging)
        written = os.path.join(attempt.staging, attempt.file) if attempt.file else attempt.staging
        if options.replace and os.path.lexists(target):
            fs.exchange(written, target)
        else:
            fs.rename_new(written, target)
        fs.sync_folder(parent)
    except FileExistsError as error:
        raise CheckpointExistsError(f"{target} was created in the meantime; this export was given up.") from error
    finally:
        # What was not finished, or what was replaced.
        if fs.is_folder(attempt.staging):
            discard(fs, attempt.staging)
        lock.close()


def open_blocks(index: Index, entries: Sequence[Entry]) -> TensorBlocks:
    """What reads these tensors and objects; what only torch can read is read with torch."""
    tensors = [entry for entry in entries if entry.kind == "tensor"]
    if (index.format == "dcp" or len(tensors) == len(entries)) and all(
        piece.payload is not None for entry in tensors for piece in index.contents.ranges_at(entry.place)
    ):
        return TensorBlocks(index, entries)
    from .loaded import LoadedBlocks  # needs torch

    return LoadedBlocks(index)
