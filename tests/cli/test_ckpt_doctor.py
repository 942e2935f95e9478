"""`ckpt doctor`: it says what saves need, fails where they would, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.cli.app import main
from ckpt_component.cli.health import folder_checks, machine_checks, memory_checks
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


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /proc and /sys: a host of its own, with no scheduler and no container."""
    for name in ("SLURM_STEP_ID", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    root, genuine = tmp_path / "host", open

    def opened(path: str, **how: Any) -> Any:
        return genuine(f"{root}{path}", **how)

    monkeypatch.setattr(memory_checks, "open", opened, raising=False)
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "runtime"))
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text("0::/\n")
    return root


@pytest.mark.parametrize(
    ("group", "variables", "status", "text", "fix"),
    [
        ("/", {}, "ok", "only you, and the kernel if it is out of memory", ""),
        ("/user.slice", {}, "ok", "only you, and the kernel", ""),
        ("/", {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "note", "all of step 0 of the job", "without srun"),
        ("/", {"SLURM_JOB_ID": "12"}, "ok", "as long as the Slurm job", ""),
        ("/system.slice/slurmstepd.scope/job_12/step_3/user/task_0", {}, "note", "step 3 of the job", "without srun"),
        ("/system.slice/slurmstepd.scope/job_12/step_batch/user", {}, "ok", "as long as the Slurm job", ""),
        ("/", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "note", "as long as this container", "--max-restarts"),
        ("/kubepods.slice/kubepods-pod1.slice/cri-1.scope", {}, "note", "as long as this container", "--max-restarts"),
        ("/user.slice/user-7.slice/session-3.scope", {}, "note", "ends session-3.scope", "enable-linger"),
        ("/user.slice/user@7.service/app.slice/run-u1.scope", {}, "note", "ends run-u1.scope", "enable-linger"),
        ("/system.slice/train.service", {}, "note", "when train.service ends", "KillMode=process"),
    ],
)
def test_who_can_end_what_keeps_a_snapshot_is_said(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    host: Path,
    group: str,
    variables: dict[str, str],
    status: str,
    text: str,
    fix: str,
) -> None:
    (host / "proc" / "self" / "cgroup").write_text(f"0::{group}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = doctor(capsys)[1]["snapshot's end"]
    assert (
        found["status"] == status and text in found["text"] and fix in found["fix"] and bool(fix) == bool(found["fix"])
    )


def test_a_container_is_known_by_its_file(capsys: pytest.CaptureFixture[str], host: Path) -> None:
    (host / ".dockerenv").touch()
    assert "as long as this container" in doctor(capsys)[1]["snapshot's end"]["text"]


@pytest.mark.parametrize(
    ("lines", "limits", "text"),
    [
        ("0::/a/b", {"a/memory.max": "8000000000", "a/b/memory.max": "max"}, "/a/b (at most 8.00 GB; "),
        ("0::/a/b", {"a/memory.max": "8000000000", "a/b/memory.max": "1000000000"}, "/a/b (at most 1.00 GB; "),
        ("0::/a", {}, "/a (no limit; "),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "2000000000"}, "/a (at most 2.00 GB; "),
        ("4:cpu,memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, "/a (no limit; "),
    ],
)
def test_the_group_that_pays_for_snapshots_is_named_with_its_limit(
    capsys: pytest.CaptureFixture[str], host: Path, lines: str, limits: dict[str, str], text: str
) -> None:
    (host / "proc" / "self" / "cgroup").write_text(f"{lines}\n")
    for name, value in limits.items():
        path = host / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    found = doctor(capsys)[1]["snapshot memory"]
    assert found["status"] == "ok" and found["text"].startswith(text) and "available" in found["text"]


def test_the_folder_of_sockets_is_ours_and_can_be_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(folder: Path) -> dict[str, str]:
        monkeypatch.setenv("CKPT_RUNTIME_DIR", str(folder))
        code, findings = doctor(capsys)
        assert code == 0, "saves do without it"
        return findings["runtime folder"]

    assert found(tmp_path / "deep" / "er")["text"].endswith("deep/er will be made") and os.listdir(tmp_path) == []
    (tmp_path / "ours").mkdir(mode=0o700)
    assert found(tmp_path / "ours")["status"] == "ok"
    (tmp_path / "ours").chmod(0o755)
    open_to_all = found(tmp_path / "ours")
    assert open_to_all["status"] == "note" and "its mode is 755" in open_to_all["text"]
    (tmp_path / "file").touch()
    beside = found(tmp_path / "file" / "folder")
    assert beside["status"] == "note"
    assert all("set CKPT_RUNTIME_DIR to" in each["fix"] for each in (open_to_all, beside))
    assert sorted(os.listdir(tmp_path)) == ["file", "ours"]
