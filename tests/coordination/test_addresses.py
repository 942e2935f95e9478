"""Where other hosts reach this one."""

from __future__ import annotations

import socket

import pytest

from ckpt_component.core.coordination.connection import is_loopback, own_address
from ckpt_component.core.outside import OUTSIDE


def test_the_loopback_is_reached_by_the_loopback() -> None:
    assert OUTSIDE.address_towards("127.0.0.1") == "127.0.0.1"
    assert OUTSIDE.address_towards("localhost") in ("127.0.0.1", "::1")
    assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%eth0")


def test_without_a_store_that_has_a_host_the_job_is_where_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address(OUTSIDE) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(socket.gaierror):
        own_address(OUTSIDE)
