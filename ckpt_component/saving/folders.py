"""Paths as people write them: `~/checkpoints`, `$SCRATCH/run`."""

from __future__ import annotations

import os
import re

from ..errors import CheckpointConfigError

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expanded(path: str | os.PathLike[str], name: str) -> str:
    """The path with the home folder for `~`, and their values for environment variables.

    Args:
        path: as it was written.
        name: of its key or option, for errors.

    Raises:
        CheckpointConfigError: a variable that is not set, or the home of a user who does not exist.
    """
    text = os.fspath(path)

    def value_of(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if not os.environ.get(variable):
            raise CheckpointConfigError(
                f"{name}={text}: the environment variable {variable} is not set; set it, or write the folder out."
            )
        return os.environ[variable]

    # First `~`: what a variable holds is taken as it is.
    home = os.path.expanduser(text)
    if home.startswith("~") and home == text:
        raise CheckpointConfigError(
            f"{name}={text}: there is no home folder of {text.partition('/')[0][1:] or 'this user'}; write the folder "
            f"out, or for a folder of that name {name}=./{text}"
        )
    return _VARIABLE.sub(value_of, home)
