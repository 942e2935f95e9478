"""Expand paths such as `~/checkpoints` and `$SCRATCH/run`."""

from __future__ import annotations

import os
import re

from ..errors import CheckpointConfigError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expanded(path: str | os.PathLike[str], name: str) -> str:
    """Expand `~` and environment variables in a path.

    Args:
        path: as the user wrote it.
        name: its key or option, for errors.

    Raises:
        CheckpointConfigError: a variable is not set, or a user has no home folder.
    """
    text = os.fspath(path)

    def value_of(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if not os.environ.get(variable):
            raise CheckpointConfigError(
                f"{name}={text}: the environment variable {variable} is not set; set it, or write the folder out."
            )
        return os.environ[variable]

    # `~` first: the value of a variable is used unchanged.
    home = os.path.expanduser(text)
    if home.startswith("~") and home == text:
        raise CheckpointConfigError(
            f"{name}={text}: there is no home folder of {text.partition('/')[0][1:] or 'this user'}; write the folder "
            f"out, or for a folder of that name {name}=./{text}"
        )
    return _VARIABLE.sub(value_of, home)
