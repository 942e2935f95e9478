"""One absurd event, or one absurd manifest, ends no command: it is skipped, and events are counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forging import edit_manifest
from run_events import BEGAN, write_run

from ckpt_component import build_manager

_ABOUT = {"run": "absurd", "rank": 0, "time": BEGAN}
_SAVE = {"event": "save", **_ABOUT, "step": 1, "path": "a", "spans": {}}
_NESTED: Any = []
for _ in range(500):
    _NESTED = [_NESTED]
#: Lines of JSON, as Python's own reader accepts them.
ABSURD = {
    "far": json.dumps({"event": "run", **_ABOUT, "world_size": 1, "time": 1e20}),
    "nan": json.dumps({"event": "run", **_ABOUT, "world_size": 1, "time": float("nan")}),
    "infinite": '{"event": "run", "run": "absurd", "rank": 0, "world_size": 1, "time": 1e999}',
    "past": json.dumps({"event": "delete", **_ABOUT, "time": -1e9}),
    "text": json.dumps({"event": "run", **_ABOUT, "world_size": "two"}),
    "bool": json.dumps({"event": "run", **_ABOUT, "world_size": True}),
    "rank": json.dumps({"event": "run", **_ABOUT, "rank": {}}),
    "deep": "[" * 100_000,
    "nested": json.dumps({**_SAVE, "error": _NESTED}),
    "no path": json.dumps({"event": "save", **_ABOUT, "spans": {}}),
    "null": json.dumps({**_SAVE, "bytes": None}),
    "step": json.dumps({**_SAVE, "step": 10**400}),
    "spans": json.dumps({**_SAVE, "spans": {"write": [0, "1"]}}),
    "span": json.dumps({**_SAVE, "spans": {"write": [float("nan"), 1]}}),
    "ends": json.dumps({"event": "steps", **_ABOUT, "first": 1, "ends": [None]}),
    "no ends": json.dumps({"event": "steps", **_ABOUT, "first": 1, "ends": []}),
    "seconds": json.dumps({"event": "load", **_ABOUT, "path": "a", "spans": {}, "seconds": [1]}),
    "upload": json.dumps({"event": "upload", **_ABOUT, "step": 1, "outcome": "uploaded"}),
    "publish": json.dumps({"event": "publish", **_ABOUT, "step": 1, "outcome": "published", "version": 1}),
    "kind": json.dumps({"event": ["save"], **_ABOUT}),
    "list": "[1]",
}


@pytest.mark.parametrize("command", ["log", "report", "trace"])
def test_absurd_events_are_skipped_and_counted(
    command: str, ckpt: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, out = tmp_path / "run", ["--out", tmp_path / "trace.json"] if command == "trace" else []
    write_run(run)
    file, json_of = run / "events" / "rank-00000.jsonl", [] if command == "trace" else ["--json"]
    whole, before = file.read_text(), ckpt(command, run, *out, *json_of)
    assert before.code == 0 and not caplog.records and (command == "trace" or before.json)
    file.write_text("\n".join([*ABSURD.values(), whole]))
    after = ckpt(command, run, *out, *json_of)
    assert after.code == 0 and after.out == before.out
    assert caplog.messages == [
        f"{run}: {len(ABSURD)} events that are not of the form that this release writes, skipped"
    ]
    for name, line in ABSURD.items():
        file.write_text(f"{whole}\n{line}\n")
        caplog.clear()
        assert ckpt(command, run, *out, *json_of).code == 0, name
        assert [text.count("an event that is not of the form") for text in caplog.messages] == [1], name


@pytest.mark.parametrize("created", [1e20, -5, "soon", None, float("nan"), 10**400, [1]])
def test_an_absurd_manifest_ends_no_command(created: Any, ckpt: Callable[..., Any], tmp_path: Path) -> None:
    with build_manager(
        "sync", ["checkpoint.durability=process_crash", "checkpoint.events=false"], dir=tmp_path
    ) as manager:
        manager.save(1, {"step": 1})
    edit_manifest(tmp_path / "iter_0000001", lambda content: {**content, "created": created})
    for command in ("ls", "log", "show"):
        ran = ckpt(command, tmp_path)
        assert ran.code == 0 and not ran.err, command
