"""Keys, metrics, errors and arguments are printed escaped: a checkpoint may come from anybody."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointError, CheckpointLoadError, CheckpointStageError, build_checkpointer, build_manager
from ckpt_component.cli import output
from ckpt_component.events import read_events

#: Sets a title, a colour that the commands use too, the direction of writing, and begins a line.
EVIL = "\x1b]0;title\x07\x1b[31mEVIL\u202e\nnext"
ESCAPED = r"\x1b]0;title\x07\x1b[31mEVIL\u202e\nnext"


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """A folder with such a key and metric, a damaged tensor, and an event of a failed save."""
    root = tmp_path / "run"
    settings = ["checkpoint.durability=process_crash", "checkpoint.save.at_end=false", "checkpoint.on_error=warn"]
    for step in (1, 2):
        with build_manager("sync", settings, dir=root) as manager:
            manager.restore({EVIL: torch.zeros(3)})
            manager.save(step, {EVIL: torch.full((3,), float(step))}, metrics={EVIL: 0.5})
    data = root / "iter_0000002" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[content.index(b"\0\0\0\x40") + 3] ^= 1
    data.write_bytes(content)
    events = root / "events" / "rank-00000.jsonl"
    saves = [event for event in read_events(root) if event["event"] == "save"]
    with events.open("a") as file:
        file.write(json.dumps({**saves[0], "step": 3, "outcome": "failed", "error": EVIL}) + "\n")
    return root


@pytest.mark.parametrize("colored", [False, True])
def test_no_command_prints_what_a_terminal_would_act_on(
    colored: bool, ckpt: Callable[..., Any], forged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "has_color", lambda stream: colored)
    one, two = forged / "iter_0000001", forged / "iter_0000002"
    asked: list[tuple[Any, ...]] = [("show", one), ("show", one, "--flat"), ("verify", two), ("diff", one, two)]
    asked += [("log", forged), ("report", forged), ("show", one, f"no{EVIL}")]
    for command in asked:
        ran = ckpt(*command)
        printed = ran.out + ran.err
        assert ESCAPED[:40] in printed, command
        assert not any(raw in printed for raw in ("\x07", "\u202e", "\x1b]", "\x1b[31mEVIL", "\nnext")), command
        assert colored or "\x1b" not in printed, command
    for wrong in (("ls", forged, f"--{EVIL}"), (EVIL,), ("ls", f"{forged}{EVIL}"), ("show", one, "--depth", EVIL)):
        ran = ckpt(*wrong)
        printed = ran.out + ran.err
        assert ran.code == 2 and ESCAPED[:20] in printed and "\x1b]" not in printed and "\x07" not in printed, wrong


def test_errors_and_log_lines_quote_keys_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({EVIL: torch.ones(3)}, tmp_path / "one")
        with pytest.raises(CheckpointLoadError) as shape:
            checkpointer.load(tmp_path / "one", {EVIL: torch.ones(4)})
        with pytest.raises(CheckpointStageError) as kind:
            checkpointer.save({EVIL: torch.ones(3, device="meta")}, tmp_path / "two")
        checkpointer.load(tmp_path / "one", {f"other{EVIL}": torch.ones(3)})
    texts = [str(shape.value), str(kind.value), *(record.getMessage() for record in caplog.records)]
    assert sum(ESCAPED in text for text in texts) >= 3 and not any("\x1b" in text or "\n" in text for text in texts)
    assert str(CheckpointError("Grüße, 東京")) == "Grüße, 東京"


def test_a_float_is_one_part_of_a_key(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(
            {"a": {1.5: torch.ones(1), 1.25: torch.ones(2)}, "m.n": {"x": torch.ones(1)}}, tmp_path / "one"
        )
    lines = ckpt("show", tmp_path / "one").out.split("\n\n", 1)[1].splitlines()[1:]
    assert [(len(line) - len(line.lstrip()), line.split()[0]) for line in lines] == [
        (0, "a"),
        (2, "1.5"),
        (2, "1.25"),
        (0, "m.n.x"),
    ]
