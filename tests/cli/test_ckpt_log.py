"""`ckpt log`: the runs of a folder, with what they resumed from, changed, saved, and what failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_manager
from ckpt_component.core.commit.manifest import decode_manifest, encode_manifest


def train(root: Path, steps: Sequence[int], *overrides: str) -> None:
    """One run: restores, and saves these steps."""
    with build_manager("sync", dir=root, overrides=overrides) as manager:
        state = {"weight": torch.zeros(3)}
        manager.restore(state)
        for step in steps:
            manager.save(step, state, metrics={"val_loss": 1 / step})


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: the second goes back to step 200, and its checkpoints are deleted by the third."""
    root = tmp_path_factory.mktemp("log") / "checkpoints"
    train(root, [100, 200, 300])
    train(root, [250, 280], "checkpoint.resume=200", "checkpoint.rewind=true", "checkpoint.keep.last=10")
    train(root, [350], "checkpoint.keep.last=1", "checkpoint.on_error=warn")
    return root


def test_runs_with_their_origins_and_changes(branched: Path, ckpt: Callable[..., Any]) -> None:
    first, second, third = ckpt("log", branched, "--json").json["runs"]
    assert (first["known"], first["resumed_from"], first["parent"]) == (True, None, None)
    assert [(saved["step"], saved["state"]) for saved in first["saved"]] == [
        (100, "deleted"),
        (200, "deleted"),
        (300, "set aside"),
    ]
    assert (second["resumed_from"], second["parent"], second["later"]) == ("iter_0000200", 0, [300])
    assert [saved["state"] for saved in second["saved"]] == ["deleted", "deleted"]
    assert (third["resumed_from"], third["parent"], third["later"]) == ("iter_0000280", 1, [])
    assert {change["key"]: (change["before"], change["after"]) for change in third["changes"]} == {
        "checkpoint.keep.last": ("3", "1"),
        "checkpoint.on_error": ("raise", "warn"),
    }
    text = ckpt("log", branched).out
    assert text.index("run 3") < text.index("run 2") < text.index("run 1")
    assert "resumed from iter_0000200 of run 1, a branch: run 1 went on to step 300" in text
    assert "since run 1:" in text and "checkpoint.keep.last: 3 -> 1" in text and "deleted since: 280, 250" in text


def test_without_events_the_manifests_say_it(root: Path, ckpt: Callable[..., Any]) -> None:
    with build_manager("sync", dir=root, overrides=["checkpoint.keep.last=9", "checkpoint.events=false"]) as manager:
        state: dict[str, Any] = {}
        manager.restore(state)
        manager.save(500, state)
    for file in (root / "events").iterdir():
        file.unlink()
    first, second = ckpt("log", root, "--json").json["runs"]
    assert [saved["step"] for saved in first["saved"]] == [100, 200, 300, 400]
    assert (second["resumed_from"], second["parent"]) == ("iter_0000400", 0)
    assert {"checkpoint.keep.last", "checkpoint.events"} <= {change["key"] for change in second["changes"]}


def test_failures_and_runs_without_checkpoints(root: Path, ckpt: Callable[..., Any]) -> None:
    file = root / "events" / "rank-00000.jsonl"
    start = json.loads(file.read_text().splitlines()[0])
    with file.open("a") as stream:
        for event in (
            {"event": "run", "time": start["time"] + 99, "run": "later", "rank": 0, "world_size": 4},
            {
                "event": "load",
                "time": start["time"] + 99,
                "run": "later",
                "rank": 0,
                "outcome": "failed",
                "error": "no",
                "path": "x",
                "spans": {},
            },
            {
                "event": "save",
                "time": start["time"] + 1,
                "run": start["run"],
                "rank": 0,
                "step": 250,
                "outcome": "failed",
                "error": "No space left",
                "path": "x",
                "spans": {},
            },
            *(
                {
                    "event": "save",
                    "time": start["time"] + 1,
                    "run": start["run"],
                    "rank": 0,
                    "step": step,
                    "outcome": outcome,
                    "error": error,
                    "path": f"host://runs/a@1f-0a/iter_{step}",
                    "memory": True,
                    "spans": {},
                }
                for step, outcome, error in ((260, "committed", None), (270, "failed", "no memory"))
            ),
        ):
            stream.write(json.dumps(event) + "\n")
    first, second = ckpt("log", root, "--json").json["runs"]
    assert [(failure["step"], failure["error"]) for failure in first["failures"]] == [
        (250, "No space left"),
        (270, "no memory"),
    ]
    assert not {260, 270} & {saved["step"] for saved in first["saved"]}, "what was in memory is no deleted checkpoint"
    assert (second["ranks"], len(second["failures"]), second["saved"]) == (4, 1, [])
    text = ckpt("log", root).out
    assert "save of step 250 failed: No space left" in text
    assert "snapshot in memory of step 270 failed: no memory" in text


def test_checkpoints_of_earlier_releases(root: Path, ckpt: Callable[..., Any]) -> None:
    (root / "events" / "rank-00000.jsonl").unlink()
    for path in root.glob("iter_*/manifest.json"):
        content = decode_manifest(path.read_bytes(), str(path))
        del content["run"], content["resumed_from"]
        path.write_bytes(encode_manifest(content))
    (run,) = ckpt("log", root, "--json").json["runs"]
    assert not run["known"] and len(run["saved"]) == 4
    assert "unknown" in ckpt("log", root).out


def test_runs_whose_checkpoints_are_gone_or_cannot_be_read(tmp_path: Path, ckpt: Callable[..., Any]) -> None:
    train(tmp_path / "root", [100])
    train(tmp_path / "root", [200, 300], "checkpoint.keep.last=2")
    (tmp_path / "root/iter_0000300/manifest.json").write_text("{}")
    first, second = ckpt("log", tmp_path / "root", "--json").json["runs"]
    assert (first["known"], first["resumed_from"], first["saved"][0]["state"]) == (True, None, "deleted")
    assert [(saved["step"], saved["state"]) for saved in second["saved"]] == [(200, "committed"), (300, "damaged")]
    assert "from scratch" in ckpt("log", tmp_path / "root").out
    assert "it has no 'manifest'" in ckpt("show", tmp_path / "root/iter_0000300").err
