"""`ckpt` with URLs in the place of paths: the same words, the same answers. tests/cloud has those that need a server."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ckpt = Callable[..., Any]


@pytest.fixture
def url() -> str:
    """A store of this process."""
    pytest.importorskip("obstore", reason="needs the extra cloud")
    return f"memory://{uuid.uuid4().hex}/run"


def test_a_root_in_a_bucket_is_like_one_on_a_disk(ckpt: Ckpt, root: Path, tmp_path: Path, url: str) -> None:
    for step in (100, 200, 300, 400):
        done = ckpt("cp", f"{root}@{step}", f"{url}/")
        assert done.code == 0 and f" to {url}/iter_0000{step}: " in done.out, done.err
    kept = ("step", "state", "nbytes", "ranks", "metrics", "why")
    there, here = (ckpt("ls", each, "--json").json for each in (url, root))
    assert [[each[key] for key in kept] for each in there["entries"]] == [
        [each[key] for key in kept] for each in here["entries"]
    ]
    assert [there[key] for key in ("newest", "best", "metric")] == [400, 200, "val_loss"]
    shown, of_disk = (ckpt("show", f"{each}@best", "--json").json for each in (url, root))
    assert shown["entries"] == of_disk["entries"] and shown["path"] == f"{url}/iter_0000200"
    assert ckpt("show", url, "--config").out == ckpt("show", root, "--config").out
    log = ckpt("log", url, "--json").json
    assert [[saved["step"] for saved in run["saved"]] for run in log["runs"]] == [[100, 200, 300, 400]]
    assert ckpt("verify", url).out.count(": verified, ") == 4
    assert ckpt("diff", f"{url}@100", f"{root}@100").code == 0
    assert ckpt("diff", f"{url}@100", f"{root}@200", "model.*").code == 1


def test_checkpoints_come_back_move_and_go(ckpt: Ckpt, root: Path, tmp_path: Path, url: str) -> None:
    other = f"memory://{uuid.uuid4().hex}"
    assert ckpt("cp", f"{root}@100", f"{url}@7", "--dry-run").code == 0 and "does not exist" in ckpt("ls", url).err
    assert ckpt("cp", f"{root}@100", f"{url}@7").code == 0
    assert "it was there already" in ckpt("cp", f"{root}@100", f"{url}@7").out
    refused = ckpt("cp", f"{root}@200", f"{url}@7")
    assert refused.code == 2 and "exists and is no copy" in refused.err
    moved = ckpt("mv", f"{url}@7", f"{other}/x/")
    assert moved.code == 0 and f"moved {url}/iter_0000007 to {other}/x/iter_0000007" in moved.out
    assert "does not exist" in ckpt("ls", url).err
    assert ckpt("cp", f"{other}/x", f"{tmp_path / 'back'}@100").code == 0
    assert ckpt("diff", tmp_path / "back", f"{root}@100").code == 0
    last = ckpt("rm", f"{other}/x@7")
    assert last.code == 2 and "no good checkpoint left" in last.err
    assert ckpt("rm", f"{other}/x@7", "--force").code == 0


def test_gc_keeps_the_best_and_a_copy_in_progress(ckpt: Ckpt, root: Path, url: str) -> None:
    for step in (100, 200, 300, 400):
        ckpt("cp", f"{root}@{step}", f"{url}/")
    gone = ckpt("gc", url, "--keep-last", 1, "--json").json
    assert sorted(each["path"] for each in gone["deleted"]) == [f"{url}/iter_0000100", f"{url}/iter_0000300"]
    assert ckpt("verify", url).code == 0 and [each["step"] for each in ckpt("ls", url, "--json").json["entries"]] == [
        200,
        400,
    ]


def test_exports_and_imports(ckpt: Ckpt, root: Path, tmp_path: Path, url: str) -> None:
    assert ckpt("cp", f"{root}@100", f"{url}/").code == 0
    assert ckpt("export", "safetensors", url, tmp_path / "w.safetensors", "--prefix", "model").code == 0
    assert ckpt("import", url, tmp_path / "imported", "--step", 3).code == 0
    assert ckpt("diff", tmp_path / "imported", f"{root}@100").code == 0
    assert ckpt("import", tmp_path / "w.safetensors", f"{url}-imported", "--step", 4).code == 0
    assert "newest" in ckpt("ls", f"{url}-imported").out


def test_what_a_bucket_can_be_asked(ckpt: Ckpt, url: str) -> None:
    findings = {each["what"]: each for each in ckpt("doctor", url, "--json").json}
    assert {findings[what]["status"] for what in ("access", "conditional put", "rates")} == {"ok"}
    assert ckpt("ls", url).err == f"error: {url} does not exist.\n", "the trials are gone"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ls", "foo://bucket/run"], "foo://bucket/run is not in a bucket"),
        (["ls", "checkpoints", "-o", "secret"], "-o takes KEY=VALUE"),
        (["show", "memory://none/run@100"], "memory://none/run does not exist"),
        (["cp", "memory://none/run@100", "x"], "memory://none/run does not exist"),
        (["rm", "memory://none/run@100"], "memory://none/run does not exist"),
    ],
)
def test_mistakes(ckpt: Ckpt, arguments: list[str], text: str) -> None:
    if "memory" in arguments[1]:
        pytest.importorskip("obstore", reason="needs the extra cloud")
    done = ckpt(*arguments)
    assert done.code == 2 and text in done.err and done.err.count("\n") <= 2
    assert "secret" not in done.err


def test_local_paths_import_nothing_for_buckets(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ckpt_component.cli.app import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as left: assert not left.code, left.code\n"
        "loaded = [name for name in sys.modules if name.startswith(('obstore', 'ckpt_component.core.storage.object'))]\n"
        "assert not loaded, loaded"
    )
    arguments = [sys.executable, "-c", code, "cp", f"{root}@100", f"{tmp_path / 'other'}@7"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
