"""The recipe that `ckpt tune` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_bench.tuning.recipe import recipe_path, write_recipe

from ckpt_component.config import compose_checkpoint, resolve_config
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

SETTINGS = {
    "checkpoint/writer": "torch_save",
    "checkpoint/stager": "pinned",
    "checkpoint.writer.workers": "4",
    "checkpoint.writer.io": "direct",
}


def test_it_can_be_used_at_once(tmp_path: Path) -> None:
    path = recipe_path(tmp_path, "mine", replace=False)
    write_recipe(path, "async_temporal", SETTINGS, ["for any app", "workers: 1 s against 2 s"])
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.yaml"]
    # As it is printed for `build_manager`.
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", "+recipe=mine", "checkpoint.writer.io=buffered"]
    config = resolve_config(compose_checkpoint("async_persistent", overrides))
    assert config.writer["_target_"].endswith("TorchSaveWriter") and config.writer["workers"] == 4
    assert config.stager["_target_"].endswith("PinnedStager") and config.caller["_target_"].endswith("TemporalCaller")
    # What is typed beside it wins.
    assert config.writer["io"] == "buffered"


def test_nothing_is_written_over_without_a_word(tmp_path: Path) -> None:
    path = recipe_path(tmp_path, "mine", replace=False)
    write_recipe(path, "async_persistent", SETTINGS, ["the first"])
    with pytest.raises(CheckpointConfigError, match="exists; type another --name, or --replace"):
        recipe_path(tmp_path, "mine", replace=False)
    write_recipe(recipe_path(tmp_path, "mine", replace=True), "async_persistent", {}, ["the second"])
    assert "the second" in path.read_text() and len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["", "../up", "a b", "x.yaml"])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointConfigError, match="cannot be a recipe's name"):
        recipe_path(tmp_path, name, replace=False)
