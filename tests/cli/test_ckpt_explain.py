"""`ckpt explain`: what it says is what the factory builds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import build_checkpointer
from ckpt_component.cli.app import main
from ckpt_component.cli.explain_command import facts_of
from ckpt_component.config import resolve_config
from ckpt_component.config.hydra.parts import part_class
from ckpt_component.config.schema import PARTS
from ckpt_component.errors import CheckpointConfigError


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as left:
        main(["explain", *words, "--json"])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["explain", *words])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == ""
    return err.removeprefix("error: ").rstrip()


def test_every_choice_says_where_it_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("async_temporal", "checkpoint/stager=pinned", "checkpoint.writer.workers=3", "checkpoint.keep.last=null")
    got = explain(capsys, *words)
    parts = got["parts"]
    assert {kind: (parts[kind]["option"], parts[kind]["origin"]) for kind in PARTS} == {
        "stager": ("pinned", "override"),
        "caller": ("temporal", "preset async_temporal"),
        "writer": ("dcp", "preset async_persistent"),
    }
    workers = {"value": 3, "origin": "override checkpoint.writer.workers=3"}
    assert parts["writer"]["keys"]["workers"] == workers and parts["caller"]["keys"]["nice"]["origin"] == "default"
    assert got["set"] == {"checkpoint.keep.last": {"value": None, "origin": "override checkpoint.keep.last=null"}}


@pytest.mark.slow
def test_a_group_of_keys_says_where_it_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    usual = {
        "every_steps": {"value": None, "origin": "default"},
        "lease": {"value": 600.0, "origin": "default"},
        "replicas": {"value": 1, "origin": "default"},
        "peers": {"value": None, "origin": "default"},
        "max_bytes_per_second": {"value": None, "origin": "default"},
    }
    for words, option, origin in (
        ((), "none", "preset async_persistent"),
        (("checkpoint/recovery=host",), "host", "override"),
        (("checkpoint.recovery.mode=host",), "host", "override checkpoint.recovery.mode=host"),
        (("+recipe=safest",), "host", "recipe safest"),
    ):
        got = explain(capsys, *words)
        assert got["groups"] == {"recovery": {"option": option, "origin": origin, "keys": usual}}
        assert any("keeps the newest snapshot for 600 s" in line for line in got["processes"]) == (option == "host")
    got = explain(capsys, "checkpoint/recovery=host", "checkpoint.recovery.every_steps=5")
    assert "every 5 steps to memory alone" in got["waits"][0]


@pytest.mark.slow
def test_recipes_and_files_of_the_user_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    got = explain(capsys, "sync", "+recipe=fastest")
    assert (got["preset"], got["origin"]) == ("async_zero_overhead", "recipe fastest")
    assert got["set"]["checkpoint.durability"] == {"value": "process_crash", "origin": "recipe fastest"}
    assert got["parts"]["writer"]["keys"]["checksum"]["origin"] == "recipe fastest"
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine.yaml").write_text("defaults: [async_persistent, _self_]\nkeep: {last: 7}\n")
    got = explain(capsys, "mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert got["set"] == {"checkpoint.keep.last": {"value": 7, "origin": "preset mine"}}


def test_values_are_those_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    for preset in ("off", "async_zero_overhead"):
        got, settings = explain(capsys, preset), resolve_config(preset)
        for kind in PARTS:
            plain = {key: value for key, value in getattr(settings, kind).items() if key != "_target_"}
            assert {key: entry["value"] for key, entry in got["parts"][kind]["keys"].items()} == plain
        assert got["enabled"] == settings.enabled


def test_facts_of_parts_are_those_of_their_classes() -> None:
    """`explain` knows them without importing the classes, and torch with them."""
    settings = resolve_config("sync")
    for kind, options in PARTS.items():
        for option, schema in options.items():
            setattr(settings, kind, {"_target_": f"ckpt_component.{kind}s.{schema.__name__}"})
            cls = part_class(kind, getattr(settings, kind), object)
            facts = facts_of(settings)
            assert getattr(facts, kind) == option
            for name in ("takes_snapshot", "in_other_process"):
                assert getattr(facts, name) == getattr(cls, name, getattr(facts, name)), option
            assert facts.single_file == bool(getattr(cls, "single_file", "")) or kind != "writer"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["sync", "checkpoint/caller=persistent"],
        ["async_persistent", "checkpoint.writer.io=direct", "checkpoint.commit=manifest"],
        ["sync", "checkpoint/recovery=host"],
        ["async_persistent", "checkpoint.recovery.every_steps=5"],
        ["asinc"],
        ["async_persistent", "checkpoint.stager._target_=no.such.Class"],
    ],
)
def test_it_refuses_what_the_factory_refuses_in_the_same_words(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(CheckpointConfigError) as error:
        build_checkpointer(words[0], words[1:])
    assert refusal(capsys, *words) == str(error.value)


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(capsys, "checkpoint=sync")["preset"] == "sync"
    assert explain(capsys)["preset"] == "async_persistent"
    assert refusal(capsys, "sync", "off").startswith("sync and off are two presets")


@pytest.mark.slow
def test_the_text_fits_and_no_torch_is_loaded() -> None:
    program = """
import sys
from ckpt_component.cli.app import main
try:
    main(["explain", "async_zero_overhead", "+recipe=safest"])
except SystemExit as left:
    assert not left.code
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert max(map(len, done.stdout.splitlines())) <= 100
    for title in ("processes and threads of a rank", "training waits"):
        assert f"\n{title}" in done.stdout
