"""The event files: appended by each rank, never a reason for an error, and read past torn lines."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import EventFile, read_events


def numbers(root: Path) -> list[int]:
    return [event["number"] for event in read_events(root)]


def event(number: int) -> dict[str, object]:
    return {"event": "save", "number": number}


def test_events_are_read_in_the_order_of_writing_rank_by_rank(tmp_path: Path) -> None:
    for rank in (1, 0):
        EventFile(str(tmp_path), rank).append([event(rank), event(rank + 10)])
    assert numbers(tmp_path) == [0, 10, 1, 11]
    assert (tmp_path / "events" / "rank-00000.jsonl").read_text().count("\n") == 2


def test_a_restart_appends_behind_a_torn_line_which_readers_skip(tmp_path: Path) -> None:
    EventFile(str(tmp_path), 0).append([event(1), event(2)])
    path = tmp_path / "events" / "rank-00000.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    assert numbers(tmp_path) == [1]
    EventFile(str(tmp_path), 0).append([event(3)])
    assert numbers(tmp_path) == [1, 3]


@pytest.mark.parametrize("line", ["", "[1]", "null", '{"no": 1}', '{"event": 3}', "[" * 100_000, "\x00\xff"])
def test_lines_that_are_no_events_are_skipped(tmp_path: Path, line: str) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-00000.jsonl").write_text(f"{line}\n{json.dumps(event(7))}\n", "latin-1")
    assert numbers(tmp_path) == [7]


def test_a_folder_without_events_has_none(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "notes.jsonl").write_text("{}\n")
    assert numbers(tmp_path) == numbers(tmp_path / "missing") == []


class FullOnce(FileStorage):
    """A disk that is full in the middle of the second write, and has room again later."""

    writes = 0

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.writes += 1
        if self.writes in (2, 3):
            super().write(fd, [buffers[0][:10]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, offset)


def test_a_full_disk_is_one_warning_and_later_events_are_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = EventFile(str(tmp_path), 0, FullOnce())
    with caplog.at_level(logging.WARNING):
        for number in range(1, 6):
            file.append([event(number)])
    assert numbers(tmp_path) == [1, 4, 5]
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    EventFile(str(tmp_path / "gone"), 0).append([event(1)])
    assert not (tmp_path / "gone").exists() and not caplog.records
