"""Enumerations that visit every n-th case: which cases take their turn depends on the commit, and can be chosen."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def _number_of_commit() -> int:
    """How many commits lead to the one that is tested, so that each case has its turn in as many commits as there are.

    In a clone that has not all of them it is a number of the commit itself, and outside of a repository 0.
    """
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "HEAD") or 0)
    return int(_git("rev-parse", "--short=8", "HEAD") or "0", 16)


def _git(*words: str) -> str:
    """What git answers; empty: there is no git, or no repository."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# In the environment, so that all workers of pytest-xdist start at the same case.
if "CKPT_STRIDE_OFFSET" not in os.environ:
    os.environ["CKPT_STRIDE_OFFSET"] = str(_number_of_commit())
STRIDE_OFFSET = int(os.environ["CKPT_STRIDE_OFFSET"])


def first_of(stride: int) -> int:
    """The number of the first case, from 1 to `stride`."""
    return 1 + STRIDE_OFFSET % stride


def has_turn(name: str, stride: int) -> bool:
    """Whether one of many tests, of which each n-th runs, has its turn."""
    return zlib.crc32(name.encode()) % stride == STRIDE_OFFSET % stride


def in_turn(cases: Iterable[Any], stride: int, marks: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    """Parameters of a test: every n-th case has its turn, and these marks; the others have the soak marker."""
    turn = STRIDE_OFFSET % stride
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=marks if number % stride == turn else [pytest.mark.soak],
        )
        for number, case in enumerate(cases)
    ]
