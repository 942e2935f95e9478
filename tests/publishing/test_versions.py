"""Which versions are there, how they build on each other, and which are deleted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import CheckpointNotFoundError
from ckpt_component.core.commit.manifest import encode_manifest
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.publishing.versions import NAMES, Version, Versions, chain_to, deltas_up_to, to_delete


def versions(kinds: Mapping[int, bool]) -> dict[int, Version]:
    """Number -> whether it is whole."""
    manifest = {"files": [], "created": 1.0, "weights": {"committed": 0.5}}
    return {
        number: Version(number, None if whole else number - 1, 10 * number, f"/to/{NAMES.folder(number)}", manifest)
        for number, whole in kinds.items()
    }


FIVE = {1: True, 2: False, 3: False, 4: True, 5: False}


@pytest.mark.parametrize(
    ("target", "have", "chain"),
    [
        (3, None, [1, 2, 3]),
        (3, 1, [2, 3]),
        (3, 3, []),
        (5, None, [4, 5]),
        (5, 2, [4, 5]),
        (5, 4, [5]),
        (2, 5, [1, 2]),
        (1, None, [1]),
    ],
)
def test_what_a_receiver_reads(target: int, have: int | None, chain: list[int]) -> None:
    assert [version.number for version in chain_to(versions(FIVE), target, have)] == chain


@pytest.mark.parametrize(
    ("kinds", "target", "have", "text"),
    [
        (FIVE, 6, None, "There is no version 6; there are 1, 2, 3, 4, 5"),
        ({}, 1, None, "nothing has been published"),
        ({2: False, 3: False}, 3, None, "weight_v000002 has the changes of version 1, which is not there"),
        ({1: True, 3: False}, 3, 1, "weight_v000003 has the changes of version 2"),
    ],
)
def test_a_gap_is_said(kinds: dict[int, bool], target: int, have: int | None, text: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=text):
        chain_to(versions(kinds), target, have)


def test_a_base_outlives_what_builds_on_it() -> None:
    assert to_delete(versions(FIVE), 1) == [3, 2, 1]
    assert to_delete(versions(FIVE), 2) == [3, 2, 1]
    assert to_delete(versions(FIVE), 3) == []
    assert to_delete(versions(FIVE), 9) == []
    assert to_delete(versions({3: False, 4: False}), 1) == []
    assert [deltas_up_to(versions(FIVE), versions(FIVE)[number]) for number in FIVE] == [0, 1, 2, 0, 1]


def write(root: Path, number: int, **changes: Any) -> Path:
    folder = root / NAMES.folder(number)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345678")
    weights = {"version": number, "committed": 2.5, **changes.pop("weights", {})}
    files = [{"name": "model.safetensors", "size": 8, "crc32": 0}]
    content = {"version": 1, "world_size": 1, "attempt": "a", "created": 3.5, "step": 7, "files": files}
    (folder / "manifest.json").write_bytes(encode_manifest({**content, "weights": weights, **changes}))
    return folder


def test_the_versions_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = Versions(FileStorage(), str(tmp_path / "to"))
    assert listed.look() == {} and listed.next_number == 1
    write(tmp_path / "to", 1)
    write(tmp_path / "to", 2, weights={"base": 1})
    found = listed.look()
    assert [(v.number, v.base, v.step, v.is_whole, v.nbytes, v.created, v.committed) for v in found.values()] == [
        (1, None, 7, True, 8, 3.5, 2.5),
        (2, 1, 7, False, 8, 3.5, 2.5),
    ]
    assert listed.look()[1] is found[1], "its manifest is not read again"
    (tmp_path / "to" / NAMES.folder(1) / "manifest.json").unlink()
    (tmp_path / "to" / NAMES.folder(1) / "model.safetensors").unlink()
    (tmp_path / "to" / NAMES.folder(1)).rmdir()
    assert [*listed.look()] == [2] and listed.next_number == 3
    assert caplog.text == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": {"version": 3}},
        {"weights": {"base": 3}},
        {"weights": {"base": "1"}},
        {"weights": {"base": True}},
        {"weights": {"committed": None}},
        {"weights": 3},
        {"step": "7"},
        {"created": None},
        {"files": [{"name": "model.safetensors", "size": 9}]},
    ],
)
def test_what_is_no_version_is_left_out_and_said_once(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    weights = changes.pop("weights", {})
    folder = write(tmp_path, 2, weights=weights if isinstance(weights, dict) else {}, **changes)
    if not isinstance(weights, dict):
        content = json.loads((folder / "manifest.json").read_text())["manifest"]
        (folder / "manifest.json").write_bytes(encode_manifest({**content, "weights": weights}))
    listed = Versions(FileStorage(), str(tmp_path))
    assert [*listed.look()] == [1] and [*listed.look()] == [1]
    assert len(caplog.records) == 1 and str(folder) in caplog.text
    assert listed.next_number == 3
