"""Open a bucket with obstore, which is imported here and nowhere else."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..errors import CheckpointConfigError
from .object_errors import text_of

#: Schemes of buckets: the class of their store, and the prefix of its environment variables. `memory://name` is a
#: store of this process, for tests.
SCHEMES = {"s3": ("S3Store", "AWS"), "gs": ("GCSStore", "GOOGLE"), "az": ("AzureStore", "AZURE"), "memory": ("", "")}
#: The time for a request; enough for twelve parts at a time at 1 MB/s.
_TIMEOUT = "120s"


def bucket_of(path: str) -> str:
    """The scheme and the bucket of a path. Raises CheckpointConfigError if the scheme is none of `SCHEMES`."""
    scheme, _, rest = path.partition("://")
    bucket = rest.partition("/")[0]
    if scheme not in SCHEMES or not bucket:
        schemes = ", ".join(f"{each}://" for each in SCHEMES)
        raise CheckpointConfigError(f"{path} is not in a bucket; checkpoints are in folders, or below {schemes}.")
    return f"{scheme}://{bucket}"


def open_store(obstore: Any, root: str, options: Mapping[str, Any]) -> Any:
    """The store of a bucket; what `options` do not set comes from the environment.

    Raises:
        CheckpointConfigError: an option, or what the environment says, is wrong.
    """
    scheme, _, bucket = root.partition("://")
    kind, environment = SCHEMES[scheme]
    if not kind:
        return _memory_store(bucket)
    config = {name: _value(name, value) for name, value in options.items()}
    try:
        retries = {"max_retries": int(config.pop("max_retries"))} if "max_retries" in config else None
        if f"{environment}_TIMEOUT" not in os.environ:
            config.setdefault("timeout", _TIMEOUT)
        return getattr(obstore.store, kind)(bucket, config=config, retry_config=retries)
    except Exception as error:
        raise CheckpointConfigError(
            f"{root} cannot be opened, by checkpoint.storage.options and the environment: {text_of(error)}"
        ) from None


def package(root: str, home: str | None) -> Any:
    """Import obstore, from `home` if it is given."""
    if home is not None:
        sys.path.append(home)  # last in the search order, and only during the import
    try:
        return import_module("obstore")
    except ImportError as error:
        if error.name != "obstore":
            raise
        raise CheckpointConfigError(f"{root} needs obstore: pip install 'ckpt_component[cloud]'") from None
    finally:
        if home is not None:
            sys.path.remove(home)


def _value(name: str, value: Any) -> Any:
    """An option as obstore takes it: numbers are text, those of a timeout are seconds."""
    if isinstance(value, bool):
        return value
    return f"{round(1000 * value)}ms" if name.endswith("timeout") and isinstance(value, (int, float)) else str(value)


@functools.cache  # of the process, as its name says
def _memory_store(name: str) -> Any:
    return import_module("obstore.store").MemoryStore()
