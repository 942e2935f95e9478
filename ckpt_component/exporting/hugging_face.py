"""The config and tokenizer files of a Hugging Face model, to go with its weights."""

from __future__ import annotations

import json
import os
import re

from ..core.storage.safe_open import place_of, read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointLoadError

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
