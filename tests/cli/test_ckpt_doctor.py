"""`ckpt doctor`: it says what saves need, fails where they would, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_manager
from ckpt_component.cli import doctor_command, machine_checks, run_checks
from ckpt_component.cli.app import main
from ckpt_component.cli.machine_checks import check_packages
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG, FileStorage


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


@pytest.mark.parametrize(
    ("shares", "own", "status", "fix"),
    [
        (None, None, "note", "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"),
        (None, "1", "ok", ""),
        ("True", None, "note", "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"),
        ("True", "1", "note", "torchrun --rdzv-backend=c10d"),  # static rendezvous
        ("False", "1", "ok", ""),
    ],
)
def test_ranks_that_torchrun_restarts_need_a_store_of_their_own(
    shares: str | None, own: str | None, status: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, which says whether its store is shared, and without it."""
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", shares), ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", own)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    [found] = [finding for finding in check_packages() if finding.what == "torchrun restarts"]
    assert found.status == status and found.fix.startswith(fix) and bool(fix) == bool(found.fix)
    assert (metadata.version("torch") in found.text) is (fix.startswith("export"))


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
    monkeypatch.setenv(FAILPOINT, failpoint)
    monkeypatch.setenv(FAILPOINT_LOG, str(tmp_path / "log"))
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
    monkeypatch.setattr(machine_checks, "try_modes", lambda *_: (0.01, None))
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

    monkeypatch.setattr(run_checks, "open", opened, raising=False)
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


@pytest.mark.slow
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
    assert open_to_all["text"].startswith(f"checkpoint/recovery=host fails: {tmp_path / 'ours'} cannot have")
    (tmp_path / "file").touch()
    beside = found(tmp_path / "file" / "folder")
    assert beside["status"] == "note"
    assert all("set CKPT_RUNTIME_DIR to" in each["fix"] for each in (open_to_all, beside))
    assert sorted(os.listdir(tmp_path)) == ["file", "ours"]


JOB = ["--state", "8GB", "--ranks", "16"]


@pytest.fixture
def plentiful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 19 GB of memory, and one disk; the machine itself is not checked."""
    monkeypatch.setattr(doctor_command, "check_machine", lambda: ())
    monkeypatch.setattr(doctor_command, "check_packages", lambda: ())
    monkeypatch.setattr(run_checks, "available_bytes", lambda: 19_000_000_000)
    monkeypatch.setattr(run_checks, "kind_of", lambda path: "xfs")
    monkeypatch.setattr(run_checks, "is_on_disk", lambda path: False)
    monkeypatch.setattr(FileStorage, "in_memory", lambda self, path: False)
    monkeypatch.setattr(FileStorage, "free_bytes", lambda self, path: 100_000_000_000)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("plentiful")
@pytest.mark.parametrize(
    ("words", "what", "status", "text"),
    [
        ("checkpoint/recovery=peers --hosts 4", "hosts", "ok", "4 hosts"),
        ("checkpoint/recovery=peers --hosts n[1-4]", "hosts", "ok", "4 hosts: n1, n2, n3, n4"),
        ("checkpoint/recovery=peers --hosts 1", "hosts", "note", "nobody has copies"),
        ("checkpoint/recovery=peers", "hosts", "note", "how many the job has is not known here"),
        ("checkpoint/recovery=host --hosts 4", "hosts", "note", "only if all ranks are on one"),
        ("checkpoint/recovery=host", "hosts", "ok", "1 host"),
        ("checkpoint/recovery=peers --hosts n[1-4]", "peers", "ok", "n1 -> n3; n2 -> n4; n3 -> n1; n4 -> n2"),
        (
            "checkpoint/recovery=peers checkpoint.recovery.peers={n1:n9} --hosts n[1-4]",
            "peer map",
            "note",
            "names n9, ",
        ),
        ("checkpoint/recovery=peers checkpoint.recovery.peers={n1:n2} --hosts 4", "peer map", "note", "not known here"),
        ("checkpoint/recovery=peers checkpoint.recovery.replicas=3 --hosts 2", "replicas", "note", "on 1 others"),
        (
            "checkpoint/recovery=peers --hosts 4",
            "host memory",
            "ok",
            "up to 8.00 GB for 4 images of the state per rank",
        ),
        ("checkpoint/recovery=peers --hosts 4", "host memory", "ok", "4.00 GB for copies of 1 host (--state, --ranks)"),
        ("checkpoint/recovery=peers --hosts 2", "host memory", "note", "copies would be refused"),
        ("checkpoint/recovery=peers --hosts 1 --state 12GB", "host memory", "FAIL", "24.00 GB for 2 images"),
        ("checkpoint/recovery=peers", "host memory", "ok", "whether they fit is compared with --hosts, --state=40GB"),
        (
            "checkpoint.local.dir=/scratch/x --hosts 4",
            "local.dir",
            "ok",
            "up to 3 checkpoints take 6.00 GB of each host",
        ),
        ("checkpoint.local.dir=/scratch/x --state 1TB --hosts 4", "local.dir", "FAIL", "take 750.00 GB of each host"),
        (
            "checkpoint/recovery=peers --hosts 4",
            "snapshot memory",
            "ok",
            "4 images of the state per rank, and 2 copies",
        ),
    ],
)
def test_a_config_is_checked_for_the_hosts_of_its_job(
    capsys: pytest.CaptureFixture[str], words: str, what: str, status: str, text: str
) -> None:
    config, _, options = words.partition(" --")
    code, found = doctor(capsys, *JOB, "--config", *config.split(), *(f"--{options}".split() if options else []))
    assert (found[what]["status"], text in found[what]["text"]) == (status, True), found[what]
    assert bool(found[what]["fix"]) == (status != "ok") and code == (status == "FAIL")


@pytest.mark.usefixtures("plentiful")
def test_one_host_with_the_copies_of_several_is_where_memory_runs_out(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["checkpoint/recovery=peers", "checkpoint.recovery.peers={n1:n4,n2:n4,n3:n4}"]
    found = doctor(capsys, *JOB, "--config", *config, "--hosts", "n[1-4]")[1]["host memory"]
    assert found["status"] == "note" and "12.00 GB for copies of 3 hosts on n4" in found["text"]


@pytest.mark.usefixtures("plentiful")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tmpfs", "takes the host's memory"),
        ("nfs4", "over the network"),
        ("fuse.juicefs", "over the network"),
        ("overlay", "part of this container"),
        ("", "an unknown file system, 100.00 GB free"),
    ],
)
def test_the_file_system_of_the_local_folder_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, text: str
) -> None:
    monkeypatch.setattr(run_checks, "kind_of", lambda path: kind)
    monkeypatch.setattr(FileStorage, "in_memory", lambda self, path: kind == "tmpfs")
    code, found = doctor(capsys, "--config", "checkpoint.local.dir=/scratch/x")
    assert code == 0 and text in found["local.dir"]["text"]
    assert found["local.dir"]["status"] == ("note" if kind else "ok")


@pytest.mark.slow
@pytest.mark.usefixtures("plentiful")
def test_the_newest_checkpoint_tells_how_large_the_state_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build_manager("sync", dir=tmp_path / "run") as manager:
        manager.save(7, {"weight": torch.zeros(1_000_000)})
    config = ["--config", "checkpoint/recovery=host", f"checkpoint.dir={tmp_path / 'run'}"]
    text = doctor(capsys, *config)[1]["host memory"]["text"]
    assert "up to 8.01 MB for 2 images" in text and "(as step 7)" in text
    monkeypatch.setattr(run_checks, "is_on_disk", lambda path: True)
    found = doctor(capsys, *config, "--ranks", "4", "--hosts", "4")[1]["checkpoint.dir"]
    assert found["status"] == "note" and "all 4 hosts must see it" in found["text"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[08-10],big")
    assert doctor(capsys, *config, "--ranks", "4")[1]["checkpoint.dir"] == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--hosts 3", "error: --hosts=3 is for checking a config; type one too, such as --config +recipe=many_hosts."),
        ("checkpoint/recovery=peers", "is no folder; did you mean --config checkpoint/recovery=peers?"),
        ("--config checkpoint/recovry=peers", "Did you mean checkpoint/recovery=peers?"),
        ("--config checkpoint/recovery=peers --hosts n[1-", "is not a number of hosts, and not their names; type --h"),
        ("--config checkpoint/recovery=peers --ranks 0", "error: --ranks=0 must be above 0."),
        (
            "--config checkpoint/recovery=peers --state 40",
            "error: --state=40 has no unit; type one, as in --state=1.2TB",
        ),
        ("--config checkpoint/recovery=peers --hosts 4 --ranks 2", "error: 2 ranks (--ranks) cannot be on 4 hosts; "),
        (
            "--config sync checkpoint/recovery=peers",
            "checkpoint/caller=inline has none. Use checkpoint=async_persistent",
        ),
        ("--config checkpoint/recovery=peers checkpoint.recovery.peers={n1:n1}", "has n1 keep its own copies; "),
    ],
)
def test_mistakes_about_hosts_end_in_words(capsys: pytest.CaptureFixture[str], words: str, text: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", *words.split()])
    assert left.value.code == 2 and text in capsys.readouterr().err
