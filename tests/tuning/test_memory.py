"""What `ckpt tune` says of copies in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from ckpt_component.apps.tuning import memory
from ckpt_component.apps.tuning.memory import SETTING, VARIABLE, memory_advice

PLATFORM = {"glibc": ("glibc", "2.36"), "musl": ("", "")}


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[bool, list[float]]:
    """Speeds that processes find, in turn, with the setting or without."""
    found: dict[bool, list[float]] = {}
    monkeypatch.setattr(memory, "_copied", lambda environment: found[SETTING in environment[VARIABLE]].pop(0))
    monkeypatch.setattr("platform.libc_ver", lambda: PLATFORM["glibc"])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return found


def test_a_setting_that_helps_is_named_with_what_is_set_already(speeds: dict[bool, list[float]]) -> None:
    speeds.update({False: [6e9, 7e9, 5e9], True: [9e9, 10e9, 11e9]})
    said = memory_advice({VARIABLE: "glibc.malloc.perturb=0"})
    assert said is not None and f"`export {VARIABLE}=glibc.malloc.perturb=0:{SETTING}`" in said
    assert "10.0 GB/s" in said and "6.0 without" in said


@pytest.mark.parametrize(
    "with_it",
    [[6.2e9, 6.1e9, 6.0e9], [6.9e9, 6.8e9, 6.8e9], [9e9, 5e9, 9e9]],
    ids=["equal", "little", "noise"],
)
def test_one_that_does_not_is_not(speeds: dict[bool, list[float]], with_it: list[float]) -> None:
    speeds.update({False: [6e9, 7e9, 5e9], True: with_it})
    said = memory_advice({})
    assert said is not None and said.endswith("so there is nothing to set") and "export" not in said


def test_little_time_is_not_exceeded(speeds: dict[bool, list[float]]) -> None:
    speeds.update({False: [6e9], True: [10e9]})
    assert memory_advice({}, seconds=0.0) == "copies in memory were not measured, because the time is too short"


def test_nothing_is_measured_where_it_is_set_or_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(environment: Mapping[str, str]) -> float:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(memory, "_copied", refuse)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: PLATFORM["glibc"])
    assert "says already" in str(memory_advice({VARIABLE: "glibc.cpu.x86_non_temporal_threshold=0x800000"}))
    monkeypatch.setattr("platform.libc_ver", lambda: PLATFORM["musl"])
    assert memory_advice({}) is None
    monkeypatch.setattr("platform.libc_ver", lambda: PLATFORM["glibc"])
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert memory_advice({}) is None


def test_a_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = memory._copied(os.environ)
    assert isinstance(speed, float) and speed > 1e6
    monkeypatch.setattr(memory, "_COPY", "raise MemoryError('too little')")
    assert memory._copied(os.environ) == "MemoryError: too little"
    monkeypatch.setattr("platform.libc_ver", lambda: PLATFORM["glibc"])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert memory_advice({}) == "copies in memory were not measured: MemoryError: too little"
