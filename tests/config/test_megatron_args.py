"""Checkpoint configs of argparse scripts, with and without Megatron's options."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from kept_configs import compose_once

from ckpt_component import CheckpointConfigError
from ckpt_component.megatron.args import add_checkpoint_args, compose_from_args


def parse(*options: str, **others: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    assert add_checkpoint_args(parser) is parser
    parser.set_defaults(**others)
    return parser.parse_args(options)


def megatron(**changed: Any) -> dict[str, Any]:
    """Megatron's defaults."""
    return {
        "save": None,
        "save_interval": None,
        "save_retain_interval": None,
        "most_recent_k": -1,
        "async_save": False,
        "use_persistent_ckpt_worker": False,
        "async_ckpt_cpu_priority": 10,
        "async_ckpt_io_priority": 3,
        "async_ckpt_use_cpu_shm": False,
        "dist_ckpt_workers": 1,
        "ckpt_step": None,
        "exit_on_missing_checkpoint": False,
    } | changed


def test_a_script_of_ones_own_gets_the_preset_to_start_with() -> None:
    assert compose_from_args(parse()) == compose_once("async_persistent")


def test_preset_and_overrides() -> None:
    options = ["--checkpoint-preset", "sync", "--checkpoint-override", "checkpoint.writer.workers=4"]
    config = compose_from_args(parse(*options, "--checkpoint-override", "checkpoint/stager=pinned"))
    assert config == compose_once("sync", ["checkpoint.writer.workers=4", "checkpoint/stager=pinned"])


def test_a_wrong_override_is_told_in_words() -> None:
    with pytest.raises(CheckpointConfigError, match=r"There is no key checkpoint\.writer\.worker"):
        compose_from_args(parse("--checkpoint-override", "checkpoint.writer.worker=4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "preset"),
    [
        ({}, "sync"),
        ({"async_save": True}, "async_temporal"),
        ({"async_save": True, "use_persistent_ckpt_worker": True}, "async_persistent"),
    ],
)
def test_megatrons_options_choose_the_preset(options: dict[str, Any], preset: str) -> None:
    chosen = compose_from_args(parse(**megatron(**options)))
    assert chosen.caller._target_ == compose_once(preset).caller._target_
    explicit = compose_from_args(parse("--checkpoint-preset", "sync", **megatron(**options)))
    assert explicit.caller._target_ == compose_once("sync").caller._target_


def test_megatrons_options_are_taken_over() -> None:
    config = compose_from_args(
        parse(
            "--checkpoint-override",
            "checkpoint.writer.workers=8",
            **megatron(
                save="/data/it's here, [x]=1\\",
                save_interval=200,
                save_retain_interval=2000,
                async_save=True,
                use_persistent_ckpt_worker=True,
                async_ckpt_cpu_priority=15,
                async_ckpt_use_cpu_shm=True,
                dist_ckpt_workers=4,
                ckpt_step=600,
            ),
        )
    )
    assert config.dir == "/data/it's here, [x]=1\\"
    assert config.save.every_steps == 200
    assert config.keep.every_steps == 2000 and config.keep.last is None
    assert config.caller.nice == 15 and config.caller.io_priority == "idle"
    assert config.stager._target_.endswith("SharedMemoryStager")
    assert config.writer.workers == 8  # what was added comes on top
    assert config.resume == 600


def test_keeping_the_most_recent() -> None:
    config = compose_from_args(parse(**megatron(save="/x", most_recent_k=2, exit_on_missing_checkpoint=True)))
    assert config.keep.last == 2 and config.resume == "must"
    assert compose_from_args(parse(**megatron())).keep.last == compose_once("sync").keep.last


def test_off_has_no_parts_to_set() -> None:
    options = megatron(save="/x", dist_ckpt_workers=4, async_save=True)
    assert compose_from_args(parse("--checkpoint-preset", "off", **options)).enabled is False
