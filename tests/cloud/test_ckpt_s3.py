"""`ckpt` and a bucket of a real server: credentials by options, and what a user mistypes."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
from cloud.proxy import Answer, CutAfter, FaultProxy, Strip
from cloud.server import KEYS, REGION, Bucket

from ckpt_component import build_manager
from ckpt_component.cli.app import main

pytestmark = pytest.mark.slow


def ckpt(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with build_manager("sync", dir=tmp_path / "checkpoints") as manager:
        for step in (100, 200):
            manager.save(step, {"w": torch.full((1 << 20,), float(step)), "epoch": step})
    return tmp_path / "checkpoints"


def options(bucket: Bucket, **changed: str) -> list[str]:
    values = {**KEYS, "endpoint": bucket.server.endpoint, "region": REGION, "allow_http": "true", **changed}
    return [text for key, value in values.items() for text in ("-o", f"{key}={value}")]


def test_options_instead_of_the_environment(root: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "DEFAULT_REGION", "ALLOW_HTTP"):
        monkeypatch.delenv(f"AWS_{name}")
    url, given = f"s3://{bucket.name}/run", options(bucket)
    said = ""
    for words in (
        ["cp", f"{root}@200", f"{url}/"],
        ["ls", url],
        ["show", url],
        ["log", url],
        ["verify", url],
        ["diff", url, f"{root}@200"],
        ["doctor", url],
        ["export", "torch", url, root.parent / "all.pt"],
        ["import", url, root.parent / "imported", "--step", 1],
        ["mv", url + "@200", url + "@300"],
        ["gc", url],
        ["rm", "--force", url + "@300"],
    ):
        code, out, err = ckpt(*words, *given)
        assert code == 0, (words, out, err)
        said += out + err
    assert KEYS["secret_access_key"] not in said and "2 items" in said
    assert "iter_" not in " ".join(bucket.keys())


def test_mistakes_are_told_in_two_lines(root: Path, bucket: Bucket, proxy: FaultProxy) -> None:
    code, _, err = ckpt("ls", "s3://no-such-bucket/run")
    assert code == 2 and err.count("\n") == 2 and "NoSuchBucket" in err and "create the bucket" in err
    proxy.add(Answer(403), times=None)
    code, _, err = ckpt("ls", f"s3://{bucket.name}/run")
    assert code == 2 and err.count("\n") == 2 and "403" in err and "credentials" in err
    code, out, _ = ckpt("doctor", f"s3://{bucket.name}/run")
    assert code == 1 and "FAIL  access" in out and "credentials" in out
    code, _, err = ckpt("ls", f"s3://{bucket.name}/run", "-o", "endpoint=http://127.0.0.1:9")
    assert code == 2 and err.count("\n") == 2 and "correct the endpoint" in err


def test_a_store_that_ignores_conditions_is_told_by_doctor(bucket: Bucket, proxy: FaultProxy) -> None:
    proxy.add(Strip("if-none-match"), times=None)
    code, out, _ = ckpt("doctor", f"s3://{bucket.name}/run")
    assert code == 1 and "FAIL  conditional put" in out and "If-None-Match" in out


def test_a_copy_whose_answers_are_lost_is_there_once(root: Path, bucket: Bucket, proxy: FaultProxy) -> None:
    url = f"s3://{bucket.name}/run"
    proxy.add(CutAfter(), where=lambda request: request.method in ("PUT", "POST"), nth=2)
    code, out, err = ckpt("cp", f"{root}@200", f"{url}/")
    assert code == 0 and "copied" in out, err
    assert ckpt("verify", url)[0] == 0 and " ".join(bucket.keys()).count("manifest.json") == 1
