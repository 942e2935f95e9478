"""`ObjectStorage`, against obstore's own store in memory; see tests/cloud for one that is reached by HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.core.storage.bucket import ObjectStorage
from ckpt_component.core.storage.bucket_store import text_of, typed_errors
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import CheckpointConfigError, CheckpointSaveError

obstore = pytest.importorskip("obstore", reason="pip install 'ckpt_component[cloud]'")

PART = 8 << 20


@pytest.fixture
def fs(request: pytest.FixtureRequest) -> Storage:
    return storage_at(f"memory://{request.node.name}")


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name}/runs/one"


def test_a_folder_exists_while_it_has_an_entry(fs: Storage, root: str) -> None:
    assert not fs.exists(root) and fs.names(root) == []
    fs.make_folders(root)
    fs.make_folders(root)
    assert fs.is_folder(root) and fs.is_real_folder(os.path.dirname(root)) and fs.names(root) == []
    with pytest.raises(FileExistsError):
        fs.make_folder(root)
    fs.write_new(f"{root}/a/b", b"1")
    fs.write_new(f"{root}/ab", b"2")
    assert fs.names(root) == ["a", "ab"] and fs.size(f"{root}/a") is None and not fs.is_folder(f"{root}/ab")
    with pytest.raises(OSError, match="not empty"):
        fs.remove_folder(root)
    fs.remove_tree(f"{root}/a")
    assert fs.names(root) == ["ab"] and not fs.exists(f"{root}/a")
    fs.unlink(f"{root}/ab")
    fs.remove_folder(root)
    assert not fs.is_folder(root)


def test_a_large_file_is_there_once_it_is_synced(fs: Storage, root: str) -> None:
    image = bytearray(os.urandom(2 * PART + 5))
    view = memoryview(image)
    fd = fs.create(f"{root}/big", len(image))
    fs.write(fd, [view[: PART // 2], view[PART // 2 : PART + 1]], 0)
    with pytest.raises(OSError, match="go in order"):
        fs.write(fd, [view[:5]], PART + 2)
    fs.write(fd, [view[PART + 1 :]], PART + 1)
    assert fs.size(f"{root}/big") is None
    assert fs.sizes(root, ["big"]) == {"big": None}
    fs.sync(fd)
    assert fs.sizes(root, ["big", "none"]) == {"big": len(image), "none": None}
    fs.sync(fd)
    fs.close(fd)
    assert fs.read(f"{root}/big", len(image)) == image
    with pytest.raises(FileExistsError):
        fs.create(f"{root}/big")


@pytest.mark.parametrize("nbytes", [5, 2 * PART])
def test_a_file_that_is_closed_early_is_not_there(fs: Storage, root: str, nbytes: int) -> None:
    fd = fs.create(f"{root}/part", 3 * PART)
    fs.write(fd, [memoryview(bytes(nbytes))], 0)
    fs.close(fd)
    assert not fs.exists(f"{root}/part")


def test_an_empty_file_needs_no_sync(fs: Storage, root: str) -> None:
    fs.close(fs.create(f"{root}/mark"))
    assert fs.size(f"{root}/mark") == 0


def test_small_files(fs: Storage, root: str) -> None:
    path = f"{root}/x"
    fs.put_new(path, b"abc", "")
    fs.write_new(path, b"abc")  # as after a request whose answer was lost
    with pytest.raises(FileExistsError):
        fs.put_new(path, b"abc", "")
    with pytest.raises(FileExistsError):
        fs.write_new(path, b"abd")
    fs.write_over(path, b"new")
    fs.append(path, b"er")
    fs.append(f"{root}/y", b"1")
    assert fs.read(path, 5) == b"newer" and fs.read(f"{root}/y", 1) == b"1"
    with pytest.raises(OSError, match="larger than the 4 bytes"):
        fs.read(path, 4)


def test_what_is_missing_is_missing(fs: Storage, root: str) -> None:
    operations: list[Callable[[str], object]] = [fs.unlink, fs.touch, fs.modified, fs.remove_tree, fs.remove_folder]
    operations.append(lambda path: fs.read(path, 1))
    for operation in operations:
        with pytest.raises(FileNotFoundError):
            operation(f"{root}/nothing")


def test_times_are_those_of_the_store(fs: Storage, root: str) -> None:
    before = time.time() - 1
    assert fs.try_folder(root, "trial") > before and fs.names(root) == []
    fs.write_new(f"{root}/a/b", b"")
    first = fs.modified(root)
    fs.touch(f"{root}/a/b")
    assert before < first < fs.modified(root) == fs.modified(f"{root}/a/b")


PUT = obstore.put


def without_conditions(*args: Any, **kwargs: Any) -> Any:
    """As by a server that ignores If-None-Match."""
    return PUT(*args, **{**kwargs, "mode": "overwrite"})


def test_a_store_that_ignores_conditions_is_refused(fs: Storage, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore, "put", without_conditions)
    with pytest.raises(OSError, match="ignores If-None-Match"):
        fs.try_folder(root, "trial")
    assert fs.names(root) == []


def test_a_checkpointer_tries_the_store_once(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[str]()
    trial = ObjectStorage.try_folder
    with monkeypatch.context() as ignoring, build_checkpointer("sync") as checkpointer:
        ignoring.setattr(obstore, "put", without_conditions)
        with pytest.raises(CheckpointSaveError, match="ignores If-None-Match"):
            checkpointer.save({"value": 1}, f"{root}/one")

    def counted(storage: ObjectStorage, path: str, name: str) -> float:
        tries.append(path)
        return trial(storage, path, name)

    monkeypatch.setattr(ObjectStorage, "try_folder", counted)
    with build_checkpointer("sync") as checkpointer:
        for name in ("two", "three"):
            checkpointer.save({"value": 1}, f"{root}/{name}")
        assert checkpointer.load(f"{root}/three")
    assert tries == [root]
    with build_manager("sync", dir=f"{root}/run") as manager:
        manager.save(1, {"value": 1})
    assert tries == [root, f"{root}/run"]


def test_a_put_that_conflicts_with_others_is_repeated(fs: Storage, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put, answers = obstore.put, ["409 Conflict: <Error><Code>ConditionalRequestConflict</Code>", ""]

    def conflicting(*args: Any, **kwargs: Any) -> Any:
        text = answers.pop(0)
        if text:
            raise obstore.exceptions.AlreadyExistsError(f"Server returned non-2xx status code: {text}")
        return put(*args, **kwargs)

    monkeypatch.setattr(obstore, "put", conflicting)
    fs.put_new(f"{root}/x", b"1", "")
    assert not answers and fs.read(f"{root}/x", 1) == b"1"


def test_a_conflict_that_means_taken_is_not_repeated() -> None:
    with pytest.raises(FileExistsError), typed_errors("x"):
        text = "status code: 409 Conflict: <Error><Code>BlobAlreadyExists</Code>"
        raise obstore.exceptions.AlreadyExistsError(text)


def test_an_error_says_what_the_store_said_and_nothing_secret() -> None:
    body = (
        "<?xml version='1.0'?>\n<Error><Code>SignatureDoesNotMatch</Code><Message>It differs</Message>"
        "<AWSAccessKeyId>AKIA</AWSAccessKeyId></Error>"
    )
    with pytest.raises(PermissionError) as caught, typed_errors("s3://b/x"):
        raise obstore.exceptions.PermissionDeniedError(
            "Error performing PUT http://h/b/x?X-Amz-Signature=abc in 2ms - Server returned non-2xx status code: "
            f"403 Forbidden: {body}\n\nDebug source:\nAKIA"
        )
    said = str(caught.value)
    assert "403 Forbidden: SignatureDoesNotMatch: It differs" in said and "s3://b/x" in said
    assert "AKIA" not in said and "performing" not in said and caught.value.__cause__ is None
    assert text_of(ValueError("plain")) == "plain"


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("ftp://host/x", {}, "below s3://, gs://, az://, memory://"),
        ("s3://", {}, "is not in a bucket"),
        ("s3://b/x", {"regoin": "eu", "secret_access_key": "hush"}, "regoin"),
        ("s3://b/x", {"timeout": "5 pm", "access_key_id": "me", "secret_access_key": "hush"}, "storage.options.*5 pm"),
        ("s3://b/x", {"max_retries": "few"}, "few"),
    ],
)
def test_a_wrong_url_or_option_is_refused(url: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(CheckpointConfigError, match=text) as caught:
        storage_at(url, options=options)
    assert "hush" not in str(caught.value)


def test_a_timeout_may_be_a_number_of_seconds() -> None:
    storage_at("s3://b/x", options={"timeout": 5, "connect_timeout": 0.5, "allow_http": True, "skip_signature": True})


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(CheckpointConfigError, match=r"s3://b needs obstore: pip install 'ckpt_component\[cloud\]'"):
        storage_at("s3://b/x")


def test_local_paths_import_nothing_of_it(tmp_path: Path) -> None:
    code = (
        "import sys; from ckpt_component.core.storage.locate import storage_at; storage_at(sys.argv[1]).names(sys.argv[1]); "
        "print([name for name in sys.modules if 'obstore' in name or name.endswith('storage.objects')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
