"""`timeouts.visible`: how long files of other ranks are waited for."""

from __future__ import annotations

import time

import pytest

from ckpt_component import CheckpointTimeoutError
from ckpt_component.core.commit.protocol import wait_visible


def test_what_does_not_become_visible_is_an_error_after_that_time() -> None:
    begun = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match=r"the file.*after 0\.3 s \(timeouts\.visible\)"):
        wait_visible(lambda: False, "the file", 0.3)
    assert 0.3 <= time.monotonic() - begun < 2


def test_what_becomes_visible_is_seen_soon() -> None:
    looks: list[float] = []
    begun = time.monotonic()
    wait_visible(lambda: looks.append(time.monotonic()) or len(looks) > 3, "the file", 60)  # type: ignore[func-returns-value]
    assert len(looks) == 4
    assert looks[0] - begun < 1  # it looks before it waits
    assert looks[-1] - begun < 5
