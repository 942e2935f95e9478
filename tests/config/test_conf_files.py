"""Every file in conf/ composes, says what it is for, and fits its schema. A new one is tested by existing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import ckpt_component
from ckpt_component.config import compose_checkpoint, config_dir, recipe_dir, resolve_config
from ckpt_component.config.schema import GROUPS, PARTS, SETTINGS, part_option

CHECKPOINT = config_dir() / "checkpoint"
PRESETS = sorted(path.stem for path in CHECKPOINT.glob("*.yaml"))
OPTIONS = [(kind, path.stem) for kind in PARTS for path in sorted((CHECKPOINT / kind).glob("*.yaml"))]
PACKAGE = Path(ckpt_component.__file__).parent
ALL_FILES = sorted({*config_dir().rglob("*.yaml"), *recipe_dir().rglob("*.yaml"), *PACKAGE.rglob("conf/**/*.yaml")})


def test_the_presets_that_the_documents_name_are_there() -> None:
    assert {"sync", "async_temporal", "async_persistent", "async_zero_overhead", "off"} <= set(PRESETS)


def test_presets_choose_the_parts_that_their_names_promise() -> None:
    configs = {preset: resolve_config(preset) for preset in PRESETS}
    chosen = {
        preset: tuple(part_option(kind, getattr(config, kind)["_target_"]) for kind in PARTS)
        for preset, config in configs.items()
    }
    assert chosen["sync"] == ("none", "inline", "dcp")
    assert chosen["async_temporal"] == ("shared_memory", "temporal", "dcp")
    assert chosen["async_persistent"] == ("shared_memory", "persistent", "dcp")
    assert chosen["async_zero_overhead"] == ("zero_overhead", "persistent", "dcp")
    assert [preset for preset, config in configs.items() if not config.enabled] == ["off"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_option_of_every_group_composes_in_every_preset(preset: str) -> None:
    # Groups are independent of each other, so that one config has an option of each; the last of a short one comes again.
    for number in range(max(map(len, GROUPS.values()))):
        chosen = {group: options[min(number, len(options) - 1)] for group, options in GROUPS.items()}
        config = resolve_config(preset, [f"checkpoint/{group}={option}" for group, option in chosen.items()])
        found = {kind: part_option(kind, getattr(config, kind)["_target_"]) for kind in PARTS}
        assert found | {group: str(getattr(config, group).mode) for group in SETTINGS} == chosen


def test_every_part_has_a_file_and_every_file_a_schema() -> None:
    assert [(kind, option) for kind in PARTS for option in sorted(PARTS[kind])] == OPTIONS


def test_every_option_of_a_group_of_keys_has_a_file() -> None:
    for group in SETTINGS:
        assert sorted(GROUPS[group]) == sorted(path.stem for path in (CHECKPOINT / group).glob("*.yaml"))


def test_every_file_opens_by_saying_what_it_is_for() -> None:
    for path in ALL_FILES:
        first = path.read_text().splitlines()[0]
        assert first.startswith("# ") and len(first.split()) >= 5 and "@package" not in first, path


def test_a_preset_says_only_what_differs_from_the_defaults() -> None:
    usual = compose_checkpoint("async_persistent")
    for preset in PRESETS:
        stated = yaml.safe_load((CHECKPOINT / f"{preset}.yaml").read_text())
        for key, value in stated.items():
            assert key == "defaults" or usual[key] != value, f"{preset}.yaml repeats {key}"


def test_a_part_says_only_its_class() -> None:
    for kind, option in OPTIONS:
        keys = set(yaml.safe_load((CHECKPOINT / kind / f"{option}.yaml").read_text()))
        assert keys == {"defaults", "_target_"}, option


def test_there_are_recipes() -> None:
    # With the group empty, a mistyped +recipe=... would add a key and run the wrong config.
    assert sorted(recipe_dir().glob("*.yaml"))
