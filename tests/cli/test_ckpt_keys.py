"""`ckpt keys`, `presets` and `recipes`: what the configs say, without loading what reads them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ckpt_component.cli.app import main
from ckpt_component.config import compose_checkpoint, resolve_config
from ckpt_component.config.config_files import parts_of, presets
from ckpt_component.config.keys import keys
from ckpt_component.config.schema import PARTS


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code, *capsys.readouterr()


@pytest.mark.slow
def test_every_key_can_be_typed_with_its_default() -> None:
    """As an override it changes nothing, so name, option and default are those of the config."""
    settings = resolve_config("async_persistent")
    for kind, options in PARTS.items():
        for option, schema in options.items():
            part: dict[str, Any] = {kind: {"_target_": f"ckpt_component.{kind}s.{schema.__name__}"}}
            typed = [f"checkpoint.{key.name}={key.default}" for key in keys() if key.option in (option, "")]
            typed = [text for text in typed if text.startswith(f"checkpoint.{kind}.") or option == "dcp"]
            chosen = resolve_config(dataclasses.replace(settings, **part))
            assert resolve_config(chosen, typed) == chosen


def test_all_keys_of_a_config_are_listed() -> None:
    listed = {key.name for key in keys()}
    for preset in presets():
        flat = OmegaConf.to_container(compose_checkpoint(preset.name), resolve=True)

        def leaves(tree: object, name: str) -> set[str]:
            if isinstance(tree, dict) and tree:
                return {leaf for key, value in tree.items() for leaf in leaves(value, f"{name}.{key}")}
            return {name[1:]}

        missing = {name for name in leaves(flat, "") if not name.endswith("_")} - listed
        assert not missing, preset


def test_the_parts_of_presets_are_those_that_hydra_composes() -> None:
    for preset in presets():
        config = compose_checkpoint(preset.name)
        targets = {kind: config[kind]._target_.rpartition(".")[2] for kind in PARTS}
        assert targets == {kind: PARTS[kind][option].__name__ for kind, option in parts_of(preset.name).items()}


def test_a_pattern_is_a_word_of_the_name_or_of_the_text_or_a_glob(capsys: pytest.CaptureFixture[str]) -> None:
    def names(pattern: str) -> list[str]:
        code, out, _ = ckpt(capsys, "keys", pattern, "--json")
        assert code == 0
        return [key["name"] for key in json.loads(out)]

    assert names("keep.last") == ["checkpoint.keep.last"]
    assert names("checkpoint.keep.*") == [f"checkpoint.{key.name}" for key in keys() if key.name.startswith("keep.")]
    assert "checkpoint.resume" in names("newest good")
    code, out, _ = ckpt(capsys, "keys")
    assert code == 0 and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["keys", "workrs"], "error: No key has 'workrs' in its name or text; try ckpt keys workers.\n"),
        (["recipes", "safst"], "error: There is no recipe safst; did you mean ckpt recipes safest?\n"),
    ],
)
def test_a_name_that_is_nowhere(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert ckpt(capsys, *arguments) == (2, "", text)


def test_recipes_and_presets_are_listed_with_their_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ckpt(capsys, "recipes", "safest")
    assert code == 0 and out.startswith("# for any app: nothing committed is ever lost")
    for command, some in (("recipes", "fastest"), ("presets", "async_persistent")):
        code, out, _ = ckpt(capsys, command)
        assert code == 0 and some in out and max(map(len, out.splitlines())) <= 100
        code, out, _ = ckpt(capsys, command, "--json")
        assert {"name", "text", "path"} <= json.loads(out)[0].keys()


def test_commands_before_a_run_load_neither_torch_nor_hydra(tmp_path: Path) -> None:
    program = """
import sys
from ckpt_component.cli.app import main
for command in (["keys"], ["presets"], ["recipes"], ["plan", "--state", "1TB"], ["doctor", "."]):
    try:
        main(command)
    except SystemExit as left:
        assert not left.code
assert not {"torch", "hydra", "omegaconf"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=60, cwd=tmp_path)
