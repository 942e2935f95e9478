"""What a checkpoint says about the run that saved it: its config, the versions, and its metrics. Imports no torch.

The record is one small file, the same in all checkpoints of a run, which the manifest lists with its CRC.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import NoneType
from typing import Any

from ...errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from ..storage.locate import absolute, is_url, storage_at
from ..storage.safe_open import read_failure
from ..storage.storage import Storage
from .manifest import data_folder, metrics_of, read_manifest
from .names import MANIFEST, NAMINGS, RUN_RECORD

#: Larger than any record.
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredConfig:
    """The config and the versions of the run that saved a checkpoint.

    Attributes:
        config: the composed config as it was written, with its interpolations: in a Hydra app the config of the whole
            job, else what the manager was built from, below `checkpoint`. Secrets are `<hidden>`.
        resolved: the same with values in place of interpolations; what must not or cannot be resolved is as in
            `config`, such as `${oc.env:HOME}`
        versions: of `ckpt_component`, `torch` and `python`
        commit: git commit that was checked out in the working folder; None: none, or it could not be read
        script: file name of the program, such as `train.py`, or the module of `python -m`; None: a notebook, or an
            older release of this package
        overrides: of the Hydra job, without the values of secrets; None: no Hydra job, or an older release
    """

    config: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    script: str | None = None
    overrides: list[str] | None = None

    def encode(self) -> bytes:
        """The content of the file."""
        text = json.dumps(_as_json(asdict(self)), indent=1)
        return f"{text}\n".encode("utf-8", "backslashreplace")


def stored_config(path: str | os.PathLike[str], fs: Storage | None = None) -> StoredConfig:
    """Read which config, versions and git commit a checkpoint was saved with.

    Args:
        path: the folder of a checkpoint that a manager saved
        fs: its storage; None: that of the path, without options

    Raises:
        CheckpointNotFoundError: there is no such checkpoint, or it has no record of its run
        CheckpointCorruptError: the record or the manifest is damaged
    """
    fs, folder, manifest = _opened(path, fs)
    entry = next((entry for entry in manifest["files"] if entry["name"] == RUN_RECORD), None)
    if entry is None:
        raise CheckpointNotFoundError(
            f"{folder} has no {RUN_RECORD}: build_checkpointer or an older release saved it; only managers store their "
            "config."
        )
    file = os.path.join(data_folder(fs, folder, manifest), RUN_RECORD)
    try:
        data = fs.read(file, _MAX_BYTES)
    except OSError as error:
        raise read_failure(file, error) from error
    if len(data) != entry["size"] or zlib.crc32(data) != entry.get("crc32"):
        raise CheckpointCorruptError(f"{file} is damaged: it does not match the size and the CRC in {MANIFEST}.")
    try:
        content = json.loads(data)
        config, resolved, versions = (content[name] for name in ("config", "resolved", "versions"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{file} is not the record of a run ({error}).") from error
    names = content.get("commit"), content.get("script")
    overrides = content.get("overrides")
    texts = all(isinstance(name, (str, NoneType)) for name in names)
    if overrides is not None and not (isinstance(overrides, list) and all(isinstance(word, str) for word in overrides)):
        texts = False
    if not texts or not all(isinstance(tree, dict) for tree in (config, resolved, versions)):
        raise CheckpointCorruptError(f"{file} is not the record of a run: it has values of other types.")
    return StoredConfig(config, resolved, versions, *names, overrides)


def running_script() -> str | None:
    """The program of this process, as `StoredConfig.script` names it."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return None if file is None else os.path.basename(file)


def other_script(path: str) -> str | None:
    """The program that saved a checkpoint, for the text of an error; None: that which runs here, or it is unknown."""
    if is_url(path):
        return None  # not worth a wait for a bucket
    try:
        script = stored_config(path).script
    except (CheckpointError, OSError):  # no manager saved it; whether it can be read is not the question here
        return None
    return None if script == running_script() else script


def stored_metrics(path: str | os.PathLike[str]) -> dict[str, float]:
    """Read the metrics that a checkpoint was saved with; none if `save` was given none.

    Args:
        path: the folder of a checkpoint

    Raises:
        CheckpointNotFoundError: there is no such checkpoint
        CheckpointCorruptError: the manifest is damaged
    """
    _, folder, manifest = _opened(path, None)
    return metrics_of(manifest, folder)


def _opened(path: str | os.PathLike[str], fs: Storage | None) -> tuple[Storage, str, dict[str, Any]]:
    """The file system, the absolute path, and the manifest of a checkpoint."""
    fs, folder = fs or storage_at(path), absolute(path)
    if not fs.exists(folder):
        raise CheckpointNotFoundError(f"{folder} does not exist; name the folder of a checkpoint.")
    manifest = read_manifest(fs, folder) if fs.is_folder(folder) else None
    if manifest is None:
        names = fs.names(folder) if fs.is_folder(folder) else []
        inside = [name for name in names if any(each.step(name) is not None for each in NAMINGS.values())]
        hint = f"; name one of the checkpoints in it, such as {os.path.join(folder, inside[-1])}" if inside else ""
        raise CheckpointNotFoundError(f"{folder} is no checkpoint of this package, because it has no {MANIFEST}{hint}.")
    return fs, folder, manifest


def _as_json(value: Any) -> Any:
    """A value of a config in the types of JSON; others, and numbers that JSON does not have, as text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
