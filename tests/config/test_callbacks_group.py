"""`callbacks: ckpt` for projects in the manner of lightning-hydra-template, and for nobody else."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig

from ckpt_component import CheckpointConfigError, build_manager
from ckpt_component.config import config_dir, override_hints, resolve_config

SEARCHPATH = "hydra.searchpath=[pkg://ckpt_component.integrations.conf]"


@pytest.fixture
def compose(hydra_version: dict[str, str]):  # type: ignore[no-untyped-def]
    def composed(*overrides: str) -> DictConfig:
        with hydra.initialize_config_dir(str(config_dir()), **hydra_version):
            return hydra.compose(overrides=[SEARCHPATH, *overrides])

    return composed


def test_the_group_is_a_callback_with_a_preset(  # type: ignore[no-untyped-def]
    compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    node = compose("+callbacks=ckpt", "callbacks.ckpt.checkpoint.save.every_steps=7").callbacks.ckpt
    assert node._target_ == "ckpt_component.integrations.lightning.CheckpointCallback" and node._recursive_ is False
    settings = resolve_config(node.checkpoint)
    assert settings.save.every_steps == 7 and settings.stager["_target_"].endswith("SharedMemoryStager")
    with build_manager(node.checkpoint, dir=node.dir):
        pass


def test_preset_and_parts_are_chosen_below_it(compose) -> None:  # type: ignore[no-untyped-def]
    words = (
        "checkpoint@callbacks.ckpt.checkpoint=sync",
        "checkpoint/writer@callbacks.ckpt.checkpoint.writer=torch_save",
    )
    node = compose("+callbacks=ckpt", *words).callbacks.ckpt
    assert node.checkpoint.caller._target_.endswith("InlineCaller")
    assert node.checkpoint.writer._target_.endswith("TorchSaveWriter")


def test_apps_that_do_not_ask_for_it_do_not_see_it(hydra_version: dict[str, str]) -> None:
    with (
        hydra.initialize_config_dir(str(config_dir()), **hydra_version),
        pytest.raises((CheckpointConfigError, hydra.errors.HydraException), match="callbacks"),
    ):
        hydra.compose(overrides=["callbacks=ckpt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("callbacks.ckpt.checkpoint.svae.every_steps=7", "callbacks.ckpt.checkpoint.save.every_steps=7?"),
        ("callbacks.ckpt.dri=x", "callbacks.ckpt.dir=x?"),
        ("checkpoint@callbacks.ckpt.checkpoint=synk", "checkpoint@callbacks.ckpt.checkpoint=sync?"),
    ],
)
def test_a_typo_below_it_is_refused_with_a_suggestion(
    override: str, hint: str, tmp_path: Path, hydra_version: dict[str, str]
) -> None:
    lines = "defaults: [callbacks: ckpt, _self_]\nhydra: {searchpath: ['pkg://ckpt_component.integrations.conf']}\n"
    (tmp_path / "train.yaml").write_text(lines)
    with (
        override_hints(),
        hydra.initialize_config_dir(str(tmp_path), **hydra_version),
        pytest.raises(CheckpointConfigError) as caught,
    ):
        hydra.compose("train", [override])
    assert f"Did you mean {hint}" in str(caught.value)
