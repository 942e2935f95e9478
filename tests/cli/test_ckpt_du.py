"""`ckpt du`: what folders of checkpoints take, where checkpoints share files."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token

Ckpt = Callable[..., Any]
#: The least that the checkpoints of `sharing` share: their base.
BASE_BYTES = 4 << 18


def taken(*folders: Path) -> int:
    """Bytes of all files, each of which counts once."""
    status = [path.lstat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sum({each.st_ino: each.st_size for each in status}.values())


def sizes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def sizes_of(found: dict[str, Any]) -> list[int]:
    """The sizes of all rows."""
    return [*(entry["bytes"] for entry in found["entries"]), found["other_bytes"]]


def test_what_a_checkpoint_shares_is_not_freed_with_it(ckpt: Ckpt, sharing: Path) -> None:
    (found,) = ckpt("du", sharing, "--json").json["roots"]
    assert [entry["step"] for entry in found["entries"]] == [1, 2, 3, 4]
    for entry in found["entries"]:
        assert entry["bytes"] == sizes(Path(entry["path"]).iterdir())
        assert entry["only_bytes"] + entry["shared_bytes"] == entry["bytes"]
        assert entry["shared_bytes"] > BASE_BYTES > 100_000 > entry["only_bytes"] > 36_000
    before = taken(sharing)
    assert (found["bytes"], found["unshared_bytes"]) == (before, sizes(sharing.rglob("*")))
    would = ckpt("gc", sharing, "--keep-last", "1", "--dry-run")
    assert would.out.splitlines()[-1].startswith("would free ")
    removed = ckpt("rm", f"{sharing}@2", "--json")
    assert before - taken(sharing) == found["entries"][1]["only_bytes"] == removed.json["freed_bytes"]
    removed = ckpt("rm", f"{sharing}@1", f"{sharing}@3")
    assert "; other checkpoints use the same files" in removed.out.splitlines()[-1]
    (last,) = ckpt("du", sharing, "--json").json["roots"]
    assert last["entries"][0]["shared_bytes"] == 0 and last["bytes"] == last["unshared_bytes"] == taken(sharing)


def test_its_table(ckpt: Ckpt, sharing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    header, *rows, empty, total = ckpt("du", sharing).out.splitlines()
    assert header.split() == ["step", "size", "only", "shared", "what"] and empty == ""
    assert [row.split()[0] for row in rows[:4]] == ["1", "2", "3", "4"] and rows[4].endswith("other files")
    assert total.startswith("takes 1.") and "; without shared files it would take 4." in total
    assert "other folders" not in total


def test_what_is_unfinished_and_what_was_set_aside(ckpt: Ckpt, sharing: Path) -> None:
    old, token = time.time() - 3600, new_token()
    attempt = new_attempt(FileStorage(), str(sharing / "iter_0000005"), token).staging
    os.makedirs(attempt)
    base = max((sharing / "iter_0000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.link(base, os.path.join(attempt, base.name))
    Path(attempt, "own").write_bytes(bytes(7000))
    os.utime(attempt, (old, old))
    shutil.copytree(sharing / "iter_0000004", sharing / f".ckpt-quarantine.iter_0000009.{token}")
    (found,) = ckpt("du", sharing, "--json").json["roots"]
    whole = sizes((sharing / "iter_0000004").iterdir())
    assert (found["unfinished_bytes"], found["set_aside_bytes"]) == (7000, whole)
    text = ckpt("du", sharing).out.splitlines()[-1]
    assert text.startswith("deleting would free: 7000 bytes unfinished (ckpt gc), 1.") and "set aside (ckpt rm)" in text
    before = taken(sharing)
    assert ckpt("gc", sharing).code == 0 and before - taken(sharing) == 7000


def test_folders_that_share_files_with_each_other(ckpt: Ckpt, sharing: Path) -> None:
    branch = sharing.parent / "branch"
    shutil.copytree(sharing / "iter_0000004", branch / "iter_0000004", copy_function=os.link)
    alone = ckpt("du", branch, "--json").json
    assert alone["roots"][0]["entries"][0]["only_bytes"] == 0
    assert alone["bytes"] == alone["roots"][0]["elsewhere_bytes"] == taken(branch)
    assert "of it is in other folders too" in ckpt("du", branch).out
    both = ckpt("du", sharing, branch, sharing, "--json").json
    assert both["bytes"] == taken(sharing, branch) < both["unshared_bytes"] == sizes(sharing.parent.rglob("*"))
    assert ckpt("du", sharing, branch).out.splitlines()[-1].startswith("together: takes 1.")
    assert "in other folders" not in ckpt("du", sharing, branch).out.splitlines()[-1]


def test_a_folder_given_by_a_link_and_the_current_folder(
    ckpt: Ckpt, sharing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sharing.parent)
    os.symlink(sharing, "link")
    os.symlink(sharing, sharing / "itself")
    assert ckpt("du", "link", "--json").json["bytes"] == taken(sharing)
    assert ckpt("du").out.splitlines() == [
        f"takes {ckpt('du', 'run').out.splitlines()[-1].removeprefix('takes ')}",
        "run/ holds 4: ckpt du run",
    ]


def test_a_bucket_has_sizes_only(ckpt: Ckpt, sharing: Path) -> None:
    pytest.importorskip("obstore", reason="needs the extra cloud")
    url = f"memory://{uuid.uuid4().hex}/run"
    for step in (3, 4):
        assert ckpt("cp", f"{sharing}@{step}", f"{url}/").code == 0
    (found,) = ckpt("du", url, "--json").json["roots"]
    assert [entry["shared_bytes"] for entry in found["entries"]] == [0, 0]
    assert all(entry["only_bytes"] == entry["bytes"] > BASE_BYTES for entry in found["entries"])
    assert found["bytes"] == found["unshared_bytes"] == sum(sizes_of(found))
    header, *_, total = ckpt("du", url).out.splitlines()
    assert header.split() == ["step", "size", "what"] and total.endswith("; no file is shared")


def test_folders_that_are_none(ckpt: Ckpt, sharing: Path) -> None:
    none = ckpt("du", sharing, sharing.parent / "rum")
    assert none.code == 2 and "rum does not exist" in none.err and none.out == ""
    itself = ckpt("du", sharing / "iter_0000001")
    assert itself.code == 2 and "is a checkpoint, not a folder of checkpoints" in itself.err
