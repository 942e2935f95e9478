"""`ckpt doctor`: it says what saves need, fails where they would, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ckpt_component.cli.app import main
from ckpt_component.cli.health import folder_checks, machine_checks
from ckpt_component.core.storage.faults import LOG, SPEC
from ckpt_component.core.storage.files import FileStorage


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    with pytest.raises(SystemExit) as left:
        main(["doctor", *arguments, "--json"])
    assert isinstance(left.value.code, int)
    out = capsys.readouterr().out
    return left.value.code, {finding["what"]: finding for finding in json.loads(out)} if out else {}


def test_a_good_machine_and_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = doctor(capsys, str(tmp_path / "new" / "checkpoints"))
    assert code == 0 and os.listdir(tmp_path) == []
    assert {"system", "memfd", "writer process", "torch", "folder", "sync", "rename", "direct I/O"} <= found.keys()
    assert found["torch"]["text"] == metadata.version("torch")
    assert "new/checkpoints will be made" in found["folder"]["text"] and found["rename"]["status"] == "ok"


def test_the_text_has_a_line_for_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as left:
        main(["doctor", str(tmp_path / "file" / "checkpoints")])
    out = capsys.readouterr().out
    assert left.value.code == 1 and "-> name another folder" in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("failpoint", "what"),
    [
        ("make_folder:action=raise:EROFS", "folder"),
        ("sync:action=raise:EIO", "sync"),
        ("rename_new:action=raise:EPERM", "rename"),
        ("rename_new:action=skip", "rename"),
    ],
)
def test_a_folder_where_saves_fail(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failpoint: str, what: str
) -> None:
    monkeypatch.setenv(SPEC, failpoint)
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    root = tmp_path / "root"
    root.mkdir()
    code, found = doctor(capsys, str(root))
    assert code == 1 and found[what]["status"] == "FAIL" and found[what]["fix"]
    assert os.listdir(root) == []


def test_what_works_in_a_lesser_way_is_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename_new = FileStorage.rename_new

    def in_two_steps(self: FileStorage, source: str, target: str) -> bool:
        rename_new(self, source, target)
        return False

    def without_locks(self: FileStorage, fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(FileStorage, "rename_new", in_two_steps)
    monkeypatch.setattr(FileStorage, "flock", without_locks)
    monkeypatch.setattr(FileStorage, "in_memory", lambda *_: True)
    monkeypatch.setattr(FileStorage, "free_bytes", lambda *_: None)
    monkeypatch.setattr(folder_checks, "try_modes", lambda *_: (0.01, None))
    code, found = doctor(capsys, str(tmp_path))
    assert code == 0
    for what in ("rename", "locks", "durability", "free space", "direct I/O"):
        assert found[what]["status"] == "note", what


def test_a_machine_where_saves_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(machine_checks, "SharedPages", no_memory)
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=99.0", "nosuch>=1", "hydra-core<1.5,>=1.3.2"])
    code, found = doctor(capsys)
    assert code == 1 and found["hydra-core"]["status"] == "ok"
    for what in ("memfd", "torch", "nosuch"):
        assert found[what]["status"] == "FAIL" and found[what]["fix"], what


def test_the_system_is_refused_in_the_words_of_the_factory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    code, found = doctor(capsys)
    assert code == 1 and found["system"]["fix"].startswith("ckpt_component runs on Linux only, and this is darwin")


def test_a_url_needs_the_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(SystemExit) as left:
        main(["doctor", "s3://bucket/checkpoints"])
    assert left.value.code == 2 and "s3://bucket needs obstore: pip install" in capsys.readouterr().err
