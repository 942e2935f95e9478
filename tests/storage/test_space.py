"""Free space: what is there, what is needed, and what helps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckpt_component.core.commit.names import is_token_of_this_host, staging_path, token_of, token_of_try
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.space import FULL, amount, full_text, rate, refuse_without_room
from ckpt_component.errors import CheckpointStorageFullError


class Roomy(FileStorage):
    """A file system with so many bytes free; None where it does not say."""

    def __init__(self, free: int | None) -> None:
        super().__init__()
        self.free = free
        self.asked: list[str] = []

    def free_bytes(self, path: str) -> int | None:
        self.asked.append(path)
        return self.free


def test_what_is_free_is_what_the_system_says(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = FileStorage().free_bytes(str(tmp_path))
    assert free is not None and free > 0
    assert abs(free - found.f_frsize * found.f_bfree) < 0.5 * found.f_frsize * found.f_blocks


def test_the_folder_that_is_there_is_asked(tmp_path: Path) -> None:
    path = str(tmp_path / "not" / "yet")
    free = FileStorage().free_bytes(path)
    assert free is not None and abs(free - (FileStorage().free_bytes(str(tmp_path)) or 0)) < 1e8
    fs = Roomy(10)
    with pytest.raises(CheckpointStorageFullError):
        refuse_without_room(fs, os.path.join(path, "there"), 11, 0)
    assert fs.asked == [path]


def test_the_last_byte_counts(tmp_path: Path) -> None:
    target = str(tmp_path / "one")
    refuse_without_room(Roomy(100), target, 90, 10)
    refuse_without_room(Roomy(None), target, 10**18, 0)
    with pytest.raises(CheckpointStorageFullError, match="needs 90 bytes and 11 bytes are to stay free") as caught:
        refuse_without_room(Roomy(100), target, 90, 11)
    assert caught.value.errno == errno.ENOSPC


def test_the_advice_fits_the_limit(tmp_path: Path) -> None:
    target = str(tmp_path / "one")
    assert {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} == FULL
    assert full_text(Roomy(2 * 10**8), target, 15 * 10**8, errno.ENOSPC) == (
        "It needs 1.50 GB, and 0.20 GB are free there now. Delete what is not needed there, or lower "
        "checkpoint.keep.last."
    )
    assert "quota" in full_text(Roomy(1), target, 1, errno.EDQUOT)
    assert "ulimit -f" in full_text(Roomy(1), target, 1, errno.EFBIG)
    assert amount(99_999) == "99999 bytes" and amount(2_500_000) == "2.50 MB"


def test_a_try_has_a_name_of_its_own_that_is_known_as_ours() -> None:
    token = new_token()
    names = [staging_path("/root/iter_0000001", token_of_try(token, number)) for number in (1, 2, 3)]
    assert len(set(names)) == 3 and names[0].endswith(token)
    assert all(is_token_of_this_host(token_of(name)) for name in names)


@pytest.mark.parametrize(
    ("speed", "text"), [(2.5e9, "2.50 GB/s"), (159.4e6, "159 MB/s"), (3.61e6, "3.61 MB/s"), (0.0, "0.00 MB/s")]
)
def test_a_rate_has_a_unit_in_which_it_is_not_zero(speed: float, text: str) -> None:
    assert rate(speed) == text
