"""The report says which jobs saved to one disk at the same time."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import pytest

from ckpt_component.cli.reports import result
from ckpt_component.cli.reports.result import (
    Row,
    Span,
    add_span,
    disk_of,
    read_result,
    shared_disks,
    shared_text,
    spans_of,
    write_result,
)
from ckpt_component.cli.reports.sweep_report import table


def test_jobs_share_a_disk_if_they_ran_at_the_same_time() -> None:
    spans = {
        "0": Span(0, 10, ("a",)),
        "1": Span(5, 15, ("a", "b")),
        "2": Span(15, 20, ("a",)),  # began when the other ended
        "3": Span(12, 16, ("b",)),
        "4": Span(0, 20, ()),
        "5": None,
        "6": Span(0, 20, ("c",)),
    }
    assert shared_disks(spans) == {"a": ["0", "1"], "b": ["1", "3"]}
    assert shared_disks({}) == {}


def test_the_table_says_so_in_the_order_of_the_jobs() -> None:
    rows = [Row(name, figures={"stall_s": 1.0}, span=Span(0, 1, ("/dev/a of host",))) for name in ("10", "9", "2")]
    text = " ".join(table(rows).split())
    assert "jobs 2, 9, 10 saved to one disk at the same time (/dev/a of host): their times include each other's" in text
    alone = [Row(name, figures={"stall_s": 1.0}, span=Span(int(name), int(name) + 1, ("a",))) for name in "01"]
    assert "at the same time" not in table(alone) and list(spans_of(alone)) == ["0", "1"]


def test_of_many_jobs_the_text_names_some() -> None:
    text = shared_text("a", [str(n) for n in range(100)])
    assert text.startswith("jobs 0, 1, 2, 3, 4, 5, 6, ... (100 in all), 99 saved")


def test_a_disk_is_known_by_its_device_and_host(tmp_path: Path) -> None:
    assert disk_of("s3://bucket/runs/one") == disk_of("s3://bucket/two") == "s3://bucket"
    disk = disk_of(str(tmp_path))
    assert disk == disk_of(str(tmp_path / "not" / "there" / "yet")) and disk.endswith(f" of {socket.gethostname()}")
    other = next((path for path in ("/proc", "/dev/shm") if os.stat(path).st_dev != os.stat(tmp_path).st_dev), None)
    assert other is not None and disk_of(other) != disk


def test_a_network_disk_is_the_same_on_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = f"36 1 {os.major(device)}:{os.minor(device)} / /data rw - nfs nas:/export rw\n"
    monkeypatch.setattr(result, "open", lambda *_, **__: io.StringIO(mounts), raising=False)
    assert disk_of(str(tmp_path)) == "nas:/export"


def test_the_span_is_in_the_result_of_the_job(tmp_path: Path) -> None:
    add_span(str(tmp_path), Span(1, 2))  # without a result there is nothing to add to
    assert read_result(str(tmp_path)) is None
    write_result(str(tmp_path), "completed", overrides=[], choices={})
    assert Span.of(read_result(str(tmp_path)) or {}) is None
    add_span(str(tmp_path), Span(1, 2, ("a",)))
    assert Span.of(read_result(str(tmp_path)) or {}) == Span(1, 2, ("a",))
