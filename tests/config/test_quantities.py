"""Sizes, times and folders as people write them, and defaults that follow."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from kept_configs import compose_once
from omegaconf import DictConfig, OmegaConf

from ckpt_component import CheckpointConfigError, build_checkpointer, build_manager, compose_checkpoint
from ckpt_component.config import resolve_config
from ckpt_component.config.rules import deadlines, longest_pause


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8MB", 8_000_000),
        ("8 MiB", 8 << 20),
        ("8m", 8_000_000),
        ("1.3GB", 1_300_000_000),
        ("2GiB", 2 << 30),
        ("8192", 8192),
        ("1e6", 1_000_000),
        (4096, 4096),
    ],
)
def test_a_size_may_have_a_unit(text: Any, number: int) -> None:
    config = resolve_config({**plain(), "min_free_bytes": text})
    assert config.min_free_bytes == number and type(config.min_free_bytes) is int


@pytest.mark.parametrize(("text", "number"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("500ms", 0.5), ("60", 60)])
def test_a_time_may_have_a_unit(text: str, number: float) -> None:
    config = resolve_config("sync", [f"checkpoint.timeouts.write={text}", f"checkpoint.save.every_seconds={text}"])
    assert config.timeouts.write == config.save.every_seconds == number


def test_a_unit_may_stand_in_yaml_and_on_top_of_a_config() -> None:
    composed = compose_checkpoint("async_zero_overhead", ["checkpoint.min_free_bytes=2GiB"])
    config = OmegaConf.merge(composed, OmegaConf.create("{retry: {backoff_seconds: 2s}, writer: {block_bytes: 1MiB}}"))
    assert isinstance(config, DictConfig)
    done = resolve_config(config, ["checkpoint.writer.max_bytes_per_second=1GB/s"])
    assert done.retry.backoff_seconds == 2
    assert (done.min_free_bytes, done.writer["block_bytes"]) == (2 << 30, 1 << 20)
    assert done.writer["max_bytes_per_second"] == 1e9
    build_checkpointer(done).close()


@pytest.mark.parametrize(
    ("key", "text"),
    [("min_free_bytes", "8XB"), ("min_free_bytes", "big"), ("min_free_bytes", "0.5"), ("max_stall_s", "8MB")],
)
def test_another_text_is_refused(key: str, text: str) -> None:
    with pytest.raises(CheckpointConfigError, match=f"checkpoint.{key}"):
        resolve_config({**plain(), key: text})


def test_a_composed_config_has_plain_texts_and_can_be_pickled() -> None:
    config = compose_checkpoint()
    assert config.on_error == "raise" and config.durability == "power_cut"
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("set_by_user", "heartbeat", "stall", "write"),
    [
        ({}, 30, 300, 1800),
        ({"write": 60}, 15, 30, 60),
        ({"stall": 20}, 10, 20, 1800),
        ({"stall": 3000}, 30, 3000, 6000),
        ({"heartbeat": 400}, 400, 800, 1800),
        ({"heartbeat": 50, "write": 60}, 50, 55, 60),
    ],
)
def test_deadlines_follow_the_one_that_is_set(
    set_by_user: dict[str, float], heartbeat: float, stall: float, write: float
) -> None:
    times = deadlines(resolve_config({**plain(), "timeouts": set_by_user}))
    assert (times["heartbeat"], times["stall"], times["write"]) == (heartbeat, stall, write)


def test_one_key_is_enough_for_a_long_stall_and_a_long_pause() -> None:
    config = resolve_config("async_persistent", ["checkpoint.max_stall_s=10m", "checkpoint.retry.backoff_seconds=2m"])
    assert deadlines(config)["stage"] == 600 and longest_pause(config.retry) == 120
    build_checkpointer(config).close()


@pytest.mark.parametrize("by_argument", [True, False])
@pytest.mark.parametrize("folder", ["~/ck", "$HOME/ck", "${HOME}/ck"])
def test_a_folder_may_begin_with_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, by_argument: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    if not by_argument and "{" in folder:
        folder = "${oc.env:HOME}/ck"  # in a config, ${...} is an interpolation
    config = resolve_config({**plain(), **({} if by_argument else {"dir": folder})})
    with build_manager(config, dir=folder if by_argument else None) as manager:
        manager.save(1, {"step": 1})
    assert (tmp_path / "home" / "ck" / "iter_0000001").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def plain() -> dict[str, Any]:
    """The preset `sync` as a dict."""
    found = OmegaConf.to_container(compose_once("sync"))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
