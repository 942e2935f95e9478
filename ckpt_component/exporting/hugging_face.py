"""A Hugging Face folder: weights in shards with their index, and the config and tokenizer files of a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

from ..errors import CheckpointLoadError
from ..storage.fs import FsOps
from ..storage.safe_open import place_of, read_failure
from .files import File, safetensors_file
from .selection import Tensor

#: The name of the weights in a Hugging Face folder.
WEIGHTS = "model"
INDEX = f"{WEIGHTS}.safetensors.index.json"
#: Small files of a Hugging Face folder, of which those with these endings are copied, and those that are not.
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_COPIED = re.compile(r"\..*|.*\.index\.json|manifest\.json|run\.json|integrity-\d+\.json|trainer_state\.json")
_MOST_SMALL = 256 << 20
CONFIG = "config.json"


def hugging_face_files(tensors: Sequence[Tensor], max_shard_bytes: int) -> tuple[list[File], Mapping[str, bytes]]:
    """The weights of a Hugging Face folder in files of at most so many bytes, and the index of several.

    A tensor that is larger gets a file of its own.
    """
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        return [safetensors_file(f"{WEIGHTS}.safetensors", tensors)], {}
    names = [f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    files = [safetensors_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    return files, {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def small_files(fs: FsOps, folder: str, dtype: str | None) -> dict[str, bytes]:
    """The config and tokenizer files of a Hugging Face folder; the config with the dtype of the export.

    Raises:
        CheckpointLoadError: There is no config.json.
    """
    if not folder:
        return {}
    names = [name for name in fs.names(folder) if name.endswith(_SMALL) and not _NOT_COPIED.fullmatch(name)]
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
