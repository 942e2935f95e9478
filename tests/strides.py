"""Enumerations that visit every n-th case: which cases take their turn changes from day to day, and can be chosen."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import pytest

# In the environment, so that all workers of pytest-xdist start at the same case.
os.environ.setdefault("CKPT_STRIDE_OFFSET", str(int(time.time() // 86400)))
STRIDE_OFFSET = int(os.environ["CKPT_STRIDE_OFFSET"])


def first_of(stride: int) -> int:
    """The number of the first case, from 1 to `stride`."""
    return 1 + STRIDE_OFFSET % stride


def in_turn(cases: Iterable[Any], stride: int) -> list[Any]:
    """Parameters of a test: every n-th case has its turn, the others have the soak marker."""
    turn = STRIDE_OFFSET % stride
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if number % stride == turn else [pytest.mark.soak]
        )
        for number, case in enumerate(cases)
    ]
