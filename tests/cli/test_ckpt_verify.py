"""`ckpt verify` as a user meets it: good, damaged, foreign, by key, and continued after it was cut off."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import damaged
from safetensors.torch import save_file

from ckpt_component import build_manager
from ckpt_component.cli import verify_command
from ckpt_component.cli.app import main
from ckpt_component.core.commit.manifest import decode_manifest, encode_manifest
from ckpt_component.core.commit.names import MANIFEST, MEGATRON
from ckpt_component.formats.verification import verify_items

Ckpt = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ckpt_component"


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    """Run the command; gives exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["verify", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(leaving.value.code or 0), out, err

    return run


STATE = {
    "model": {"weight": torch.arange(600_000.0), "small": {f"p{n}": torch.full((9,), float(n)) for n in range(40)}},
    "step": 7,
}


def save(root: Path, writer: str, *steps: int) -> Path:
    settings = [f"checkpoint/writer={writer}", "checkpoint.save.at_end=false"]
    with build_manager("sync", settings, dir=root) as manager:
        for step in steps:
            manager.save(step, {"model": STATE["model"]} if writer == "safetensors" else STATE)
    return root


@pytest.fixture(scope="module", params=["dcp", "torch_save", "safetensors"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param, 1, 2)


@pytest.fixture(scope="module")
def of_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("dcp"), "dcp", 1)


@pytest.fixture
def one(of_dcp: Path, tmp_path: Path) -> Path:
    """One checkpoint to damage."""
    return Path(shutil.copytree(of_dcp / MEGATRON.folder(1), tmp_path / "one"))


def file_with(folder: Path, nbytes: int) -> Path:
    return max(folder.glob("__*.distcp"), key=lambda path: path.stat().st_size >= nbytes)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_root_and_a_checkpoint(saved: Path, ckpt: Ckpt, cache: Path) -> None:
    code, out, _ = ckpt(saved)
    assert code == 0 and out.count("verified") == 2 and out.count("iter_") == 2
    code, out, _ = ckpt(f"{saved}@1", "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert code == 0 and found["state"] == "verified" and found["bytes"] > 2_400_000 and found["damaged"] == []
    assert not list(cache.glob("*"))


def test_one_that_cannot_be_verified_does_not_hide_the_others(of_dcp: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    root = Path(shutil.copytree(of_dcp, tmp_path / "root"))
    newer = Path(shutil.copytree(of_dcp / MEGATRON.folder(1), root / MEGATRON.folder(2)))
    content = {**decode_manifest((newer / MANIFEST).read_bytes(), ""), "version": 2}
    (newer / MANIFEST).write_bytes(encode_manifest(content))
    code, out, _ = ckpt(root)
    assert (
        code == 2 and "iter_0000001: verified" in out and "iter_0000002: not verified: " in out and "version 2" in out
    )
    flip(file_with(root / MEGATRON.folder(1), 2_000_000), 1_000_000)
    code, out, _ = ckpt(root, "--json")
    assert code == 1 and [each["state"] for each in json.loads(out)["checkpoints"]] == ["damaged", "unknown"]


def test_any_damage_is_found_and_named(saved: Path, ckpt: Ckpt) -> None:
    folder, twin = saved / MEGATRON.folder(1), saved / MEGATRON.folder(2)
    for seed in range(12):
        with damaged(folder, twin, random.Random(seed)) as (done, name):
            if (folder / name).read_bytes() == (twin / name).read_bytes():
                continue  # the twin's
            code, out, _ = ckpt(f"{saved}@1")
        assert code == 1 and "damaged" in out and name in out, f"{done}: {out}"


def test_damaged_keys_are_named(one: Path, ckpt: Ckpt) -> None:
    large = file_with(one, 2_000_000)
    flip(large, large.stat().st_size // 2)
    code, out, _ = ckpt(one, "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert code == 1 and [(each["file"], each["keys"]) for each in found["damaged"]] == [(large.name, ["model.weight"])]
    large.unlink()
    code, out, _ = ckpt(one)
    assert code == 1 and "is missing" in out and "model.weight" in out


def test_only_some_keys(one: Path, ckpt: Ckpt) -> None:
    code, out, _ = ckpt(one, "--key", "model.small.p1*", "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert code == 0 and found["keys"] == 11 and 0 < found["bytes"] < 40_000
    flip(file_with(one, 2_000_000), 1_000_000)
    assert ckpt(one, "--key", "model.small")[0] == 0
    assert ckpt(one, "--key", "model")[0] == 1
    code, _, err = ckpt(one, "--key", "model.wieght")
    assert code == 2 and "did you mean 'model.weight'?" in err
    os.truncate(file_with(one, 2_000_000), 1_000_000)
    assert ckpt(one, "--key", "model.small")[0] == 0 and ckpt(one, "--key", "model.weight")[0] == 1
    file_with(one, 1_000_000).unlink()
    assert ckpt(one, "--key", "model.small")[0] == 0 and ckpt(one, "--key", "model.weight")[0] == 1


@pytest.mark.parametrize("name", ["manifest.json", "integrity-0.json", ".metadata"])
def test_damage_outside_of_the_data(name: str, one: Path, ckpt: Ckpt) -> None:
    flip(one / name, 40)
    code, out, _ = ckpt(one)
    assert code == 1 and "damaged" in out and name in out


class CutOff(BaseException):
    pass


def test_one_that_has_lost_its_manifest_is_damaged(one: Path, ckpt: Ckpt) -> None:
    (one / MANIFEST).unlink()
    code, out, _ = ckpt(one)
    assert code == 1
    assert "has no manifest" in " ".join(out.split())


def test_it_continues_after_it_was_cut_off(one: Path, ckpt: Ckpt, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(fs: Any, folder: str, items: Any, report: Any, *, done: Any, **more: Any) -> None:
        first = [item for item in items if item.length > 1_000_000]
        genuine(fs, folder, first, report, done=done, **more)
        raise CutOff

    genuine = verify_items
    monkeypatch.setattr(verify_command, "verify_items", cut_off)
    with pytest.raises(CutOff):
        main(["verify", str(one)])
    monkeypatch.setattr(verify_command, "verify_items", genuine)
    (state,) = cache.glob("*")
    kept = state.read_bytes()
    code, out, _ = ckpt(one, "--resume", "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert code == 0 and found["resumed_bytes"] > 2_400_000 and not state.exists()

    state.write_bytes(kept)
    assert json.loads(ckpt(one, "--json")[1])["checkpoints"][0]["resumed_bytes"] == 0  # not asked for
    state.write_bytes(kept)
    large = file_with(one, 2_000_000)
    flip(large, 1_000_000)
    os.utime(large, (1, 1))
    assert ckpt(one, "--resume")[0] == 1  # the file has changed since
    for content in (b"{", b"[]", b"\xff", b"", kept.replace(b"\n[", b"\n[["), b"1" + kept):
        state.write_bytes(content)
        assert ckpt(one, "--resume")[0] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_other_programs_checkpoints(tmp_path: Path, ckpt: Ckpt) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"weight": torch.ones(9)}, str(tmp_path / "hf/model.safetensors"))
    code, out, _ = ckpt(tmp_path / "hf")
    assert code == 0 and "unverified: no checksums" in out
    with open(tmp_path / "hf/model.safetensors", "ab") as stream:
        stream.write(b"more")
    code, out, _ = ckpt(tmp_path / "hf")
    assert code == 1 and "damaged" in out

    dcp.save({"weight": torch.arange(500.0)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    torch.save({"weight": torch.arange(500.0)}, tmp_path / "file.pt")
    code, out, _ = ckpt(tmp_path / "stock")
    assert code == 0 and "unverified: no checksums" in out
    os.truncate(tmp_path / "stock/__0_0.distcp", 1000)
    assert ckpt(tmp_path / "stock")[0] == 1
    code, out, _ = ckpt(tmp_path / "file.pt")
    assert code == 0 and ": verified" in out
    flip(tmp_path / "file.pt", (tmp_path / "file.pt").stat().st_size // 2)
    code, out, _ = ckpt(tmp_path / "file.pt")
    assert code == 1 and "weight" in out
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(500.0)}, tmp_path / "bare.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    code, out, _ = ckpt(tmp_path / "bare.pt")
    assert code == 0 and "unverified: no checksums" in out


def test_nothing_to_verify(tmp_path: Path, ckpt: Ckpt) -> None:
    code, _, err = ckpt(tmp_path / "nowhere")
    assert code == 2 and "does not exist" in err
    (tmp_path / "empty").mkdir()
    code, _, err = ckpt(tmp_path / "empty")
    assert code == 2 and "holds no checkpoint" in err


def test_damage_in_a_file_names_all_checkpoints_that_share_it(sharing: Path, ckpt: Ckpt) -> None:
    branch = sharing.parent / "branch"
    shutil.copytree(sharing / MEGATRON.folder(3), branch / MEGATRON.folder(3), copy_function=os.link)
    base = file_with(sharing / MEGATRON.folder(2), 1_000_000)
    flip(base, 500_000)
    line = f"{base.name} is damaged; the same file is part of iter_0000001, iter_0000003, iter_0000004"
    code, out, _ = ckpt(f"{sharing}@2")
    assert code == 1 and [text.strip() for text in out.splitlines()][-1] == line
    code, out, _ = ckpt(sharing, branch, "--json")
    found = json.loads(out)["checkpoints"]
    assert code == 1 and [each["state"] for each in found] == ["damaged"] * 5
    paths = [str(sharing / MEGATRON.folder(step)) for step in range(1, 5)]
    assert found[0]["damaged"][0]["also_in"] == sorted([str(branch / MEGATRON.folder(3)), *paths[1:]])
    assert found[4]["damaged"][0]["also_in"] == paths
    flip(base, 500_000)
    own = min(base.parent.glob("*.distcp"), key=lambda path: path.stat().st_nlink)
    flip(own, own.stat().st_size // 2)
    code, out, _ = ckpt(sharing)
    assert code == 1 and out.count(": verified") == 3 and "is part of" not in out


def test_a_file_that_checkpoints_share_is_read_once(
    sharing: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = []

    def counted(fs: Any, folder: str, items: Any, report: Any, **more: Any) -> None:
        read.append(sum(item.length for item in items))
        genuine(fs, folder, items, report, **more)

    genuine = verify_items
    monkeypatch.setattr(verify_command, "verify_items", counted)
    code, out, _ = ckpt(sharing)
    assert code == 0 and read[0] > 1_000_000 and max(read[1:]) < 100_000
    assert out.count("verified") == 4 and out.count("MB of it shared and read above") == 3
    read.clear()
    assert ckpt(shutil.copytree(sharing, tmp_path / "copies"))[0] == 0 and min(read) > 1_000_000
