"""The commit protocol, step by step, on a real folder."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.manifest import check_files, decode_manifest, encode_manifest, read_manifest
from ckpt_component.core.commit.names import HUGGINGFACE, MEGATRON, STEP, TORCHTITAN
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.errors import CheckpointCorruptError, CheckpointExistsError, CheckpointSaveError


class Recording(FileStorage):
    """Notes the order of what matters for durability."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def sync(self, fd: int) -> None:
        self.calls.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        super().sync(fd)

    def sync_folder(self, path: str) -> None:
        self.calls.append("sync_folder " + os.path.basename(path))
        super().sync_folder(path)

    def rename_new(self, source: str, target: str) -> bool:
        self.calls.append(f"rename {os.path.basename(target)}")
        return super().rename_new(source, target)


def begun(fs: FileStorage, target: Path) -> Attempt:
    attempt = commit.new_attempt(fs, str(target), new_token())
    commit.begin(attempt)
    return attempt


def test_everything_is_durable_before_the_name_appears_and_the_name_before_success(tmp_path: Path) -> None:
    fs = Recording()
    attempt = begun(fs, tmp_path / "root" / "iter_0000001")
    fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
    rank = {"rank": 0, "files": [{"name": "data", "size": 4}]}
    assert commit.publish(attempt, [rank], {".metadata": b"m"}, {"format": "x"}) == 3
    staging = os.path.basename(attempt.staging)
    at = fs.calls.index
    assert at("sync data") < at("sync .metadata") < at("sync manifest.json") < at(f"sync_folder {staging}")
    assert fs.calls[-2:] == ["rename iter_0000001", "sync_folder root"]
    manifest = read_manifest(fs, attempt.target)
    assert manifest is not None and manifest["attempt"] == attempt.token
    check_files(fs, attempt.target, manifest)
    assert scan_steps(fs, str(tmp_path / "root"), MEGATRON).committed == [1]


def test_a_manifest_of_which_only_a_part_arrived_is_taken_back(tmp_path: Path) -> None:
    """A store that shows a file before it is complete: what it shows is no commit, and not damage either."""

    class Torn(FileStorage):
        def put_new(self, path: str, data: bytes, draft: str) -> None:
            Path(path).write_bytes(data[: len(data) // 2])
            raise OSError(errno.EIO, "the link was cut", path)

    fs = Torn(atomic_rename=False)
    attempt = begun(fs, tmp_path / "root" / "iter_0000001")
    fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
    with pytest.raises(OSError, match="the link was cut"):
        commit.publish(attempt, [{"rank": 0, "files": [{"name": "data", "size": 4}]}], {}, {})
    assert not os.path.exists(os.path.join(attempt.target, "manifest.json"))
    assert scan_steps(fs, str(tmp_path / "root"), MEGATRON).committed == []


def test_a_file_of_another_size_than_reported_is_not_committed(tmp_path: Path) -> None:
    fs = FileStorage()
    attempt = begun(fs, tmp_path / "one")
    fs.write_new(os.path.join(attempt.staging, "data"), b"123")
    with pytest.raises(CheckpointSaveError, match="3 bytes on disk and its writer reported 4"):
        commit.publish(attempt, [{"rank": 0, "files": [{"name": "data", "size": 4}]}], {}, {})
    commit.abandon(attempt)
    assert os.listdir(tmp_path) == []


def test_a_file_of_another_rank_that_is_visible_late_is_waited_for(tmp_path: Path) -> None:
    class Caching(FileStorage):
        looks = 0

        def size(self, path: str) -> int | None:
            if os.path.basename(path) != "theirs":
                return super().size(path)
            self.looks += 1
            return super().size(path) if self.looks > 4 else None

    fs = Caching()
    attempt = begun(fs, tmp_path / "one")
    ranks = []
    for rank, name in enumerate(("ours", "theirs")):
        fs.write_new(os.path.join(attempt.staging, name), b"1234")
        ranks.append({"rank": rank, "files": [{"name": name, "size": 4}]})
    assert commit.publish(attempt, ranks, {}, {}, visibility_timeout=60) == 3


def test_a_name_that_was_taken_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    fs = FileStorage()
    attempt = begun(fs, tmp_path / "one")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "theirs").write_text("kept")
    with pytest.raises(CheckpointExistsError, match="taken by another save"):
        commit.publish(attempt, [], {}, {})
    assert (tmp_path / "one" / "theirs").read_text() == "kept"


def test_rename_new_refuses_even_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(FileExistsError):
        FileStorage().rename_new(str(tmp_path / "a"), str(tmp_path / "b"))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real(fd, [views[0][:3]], at))
    fs = FileStorage()
    fd = fs.create(str(tmp_path / "file"))
    fs.write(fd, [memoryview(b"0123456789"), memoryview(b"abc")], 0)
    fs.close(fd)
    assert (tmp_path / "file").read_bytes() == b"0123456789abc"


def test_a_manifest_knows_when_it_was_changed() -> None:
    data = encode_manifest({"version": 1, "world_size": 1, "files": []})
    laid_out_otherwise = {"manifest": {"world_size": 1, "version": 1, "files": []}, "crc32": json.loads(data)["crc32"]}
    for same in (data, json.dumps(laid_out_otherwise, indent=1).encode()):
        assert decode_manifest(same, "x") == {"version": 1, "world_size": 1, "files": []}
    with pytest.raises(CheckpointCorruptError, match="own checksum"):
        decode_manifest(data.replace(b'"files":[]', b'"files":[1]'), "x")
    with pytest.raises(CheckpointCorruptError, match="not a complete manifest"):
        decode_manifest(data[:-3], "x")


@pytest.mark.parametrize("fails", ["is_real_folder", "size"])
def test_files_that_cannot_be_looked_at_are_not_called_damaged(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = FileStorage(atomic_rename=False)
    attempt = begun(fs, tmp_path / "iter_0000001")
    fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
    commit.publish(attempt, [{"rank": 0, "files": [{"name": "data", "size": 4}]}], {}, {})
    usual = getattr(FileStorage, fails)

    def failing(self: FileStorage, path: str) -> object:
        if path.startswith(attempt.staging):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return usual(self, path)

    monkeypatch.setattr(FileStorage, fails, failing)
    scan = scan_steps(fs, str(tmp_path), MEGATRON)
    assert "cannot be read: Input/output error" in scan.unusable[1] and not scan.damaged


def test_names() -> None:
    assert MEGATRON.folder(200) == "iter_0000200" and MEGATRON.step("iter_0000200") == 200
    assert STEP.folder(200) == "step_00000200"
    assert HUGGINGFACE.folder(2) == "checkpoint-2" and TORCHTITAN.folder(2) == "step-2"
    assert MEGATRON.step("iter_200") is None and MEGATRON.step("xiter_0000200") is None
