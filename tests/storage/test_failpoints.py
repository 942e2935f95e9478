"""The file system that counts and fails: what the environment variable says, and that it costs nothing when unset."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_component import build_checkpointer
from ckpt_component.core.storage.failpoint_fs import FailpointError, FailpointFs, parse_failpoints, read_log
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG, FileStorage
from ckpt_component.core.storage.locate import storage_at


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "ops")
    monkeypatch.setenv(FAILPOINT_LOG, path)
    return path


def test_unset_it_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAILPOINT, raising=False)
    monkeypatch.delenv(FAILPOINT_LOG, raising=False)
    assert type(storage_at(".")) is FileStorage
    assert not storage_at(".", durable=False).durable


def test_a_failpoint_without_a_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "any:nth=1:action=kill")
    monkeypatch.delenv(FAILPOINT_LOG, raising=False)
    with pytest.raises(FailpointError, match=f"{FAILPOINT_LOG} is not"):
        storage_at(".")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fly:action=kill", "unknown operation 'fly'"),
        ("write", "action=''"),
        ("write:action=explode", "action='explode'"),
        ("write:action=raise:EWRONG", "action='raise:EWRONG'"),
        ("write:action=kill:now", "action='kill:now'"),
        ("write:nth=0:action=kill", "'0'"),
        ("write:when=2:action=kill", "'when=2'"),
        ("write:nth=2:now:action=kill", "'now'"),
    ],
)
def test_what_cannot_be_understood_is_named(text: str, told: str) -> None:
    with pytest.raises(FailpointError, match=told):
        parse_failpoints(text)


def test_the_nth_match_fails_and_no_other(tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "create:path=data:nth=2:action=raise:ENOSPC; unlink:from=2:action=raise:EIO")
    fs = storage_at(".")
    fs.write_new(str(tmp_path / "other"), b"x")
    fs.write_new(str(tmp_path / "data1"), b"x")
    # Another object, as another part or process has, counts on.
    with pytest.raises(OSError, match="data2") as caught:
        storage_at(".").write_new(str(tmp_path / "data2"), b"x")
    assert caught.value.errno == errno.ENOSPC
    fs.write_new(str(tmp_path / "data3"), b"x")
    fs.unlink(str(tmp_path / "other"))
    for _ in range(2):
        with pytest.raises(OSError, match="data1"):
            fs.unlink(str(tmp_path / "data1"))
    assert [operation.operation for operation in read_log(log)][:5] == ["create", "write", "sync", "close", "create"]
    assert [operation.operation for operation in read_log(f"{log}.fired")] == ["create", "unlink", "unlink"]


def test_a_skipped_operation_is_not_done(tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "rename_new:action=skip")
    (tmp_path / "a").mkdir()
    storage = storage_at(".")
    assert isinstance(storage, FileStorage)
    storage.rename_new(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_a_torn_write_leaves_half(tmp_path: Path, log: str) -> None:
    code = (
        "from ckpt_component.core.storage.locate import storage_at; import sys; "
        "storage_at('.').write_new(sys.argv[1], b'0123456789')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")],
        env=os.environ | {FAILPOINT: "write:action=torn"},
        timeout=60,
        check=False,
    )
    assert done.returncode == -9
    assert (tmp_path / "file").read_bytes() == b"01234"


def test_the_rank_and_the_process_are_told_apart(tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "make_folder:rank=1:process=writer:action=raise:EIO")
    for rank, process, fails in (("0", "writer", False), ("1", "trainer", False), ("1", "writer", True)):
        monkeypatch.setenv("RANK", rank)
        fs = storage_at(".", process=process)
        assert isinstance(pickle.loads(pickle.dumps(fs)), FailpointFs)  # a user-made request takes it along
        folder = str(tmp_path / f"{rank}{process}")
        if fails:
            with pytest.raises(OSError):
                fs.make_folder(folder)
        else:
            fs.make_folder(folder)


def test_the_writer_process_counts_in_the_same_log(tmp_path: Path, log: str) -> None:
    with build_checkpointer("async_persistent") as checkpointer:
        futures = checkpointer.save({"step": 1}, tmp_path / "root" / "one")
        assert futures is not None
        futures[1].result(60)
    found = read_log(log)
    assert {operation.process for operation in found} == {"trainer", "writer"}
    assert len({operation.pid for operation in found}) == 2
    assert [operation.operation for operation in found if operation.process == "trainer"][-2:] == [
        "rename_new",
        "sync_folder",
    ]
