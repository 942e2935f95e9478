from __future__ import annotations

import pytest

from ckpt_component.core.processes.start import describe_exit


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "still runs"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-15, "was killed by SIGTERM"),
        (-9, "was killed by SIGKILL (probably the out-of-memory killer)"),
        (-39, "was killed by signal 39"),
    ],
)
def test_how_a_process_ended(code: int | None, text: str) -> None:
    assert describe_exit(code) == text


def test_the_kernel_log_is_named_with_the_pid() -> None:
    text = "was killed by SIGKILL (probably the out-of-memory killer, see dmesg for pid 4711)"
    assert describe_exit(-9, 4711) == text


def test_a_pid_alone_adds_nothing() -> None:
    assert describe_exit(1, 4711) == "exited with code 1"
