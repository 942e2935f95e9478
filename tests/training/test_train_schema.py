from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import hydra
import pytest
from ckpt_train import schema
from ckpt_train.schema import Data, Model, Settings, Train, read
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ckpt_component.config import config_dir, recipe_dir, resolve_config
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

Composed = Callable[..., DictConfig]


@pytest.mark.parametrize("node", [Train, Data, Model, Settings])
def test_every_key_has_a_line_on_what_it_does(node: type) -> None:
    body = next(
        part for part in ast.parse(inspect.getsource(schema)).body if getattr(part, "name", "") == node.__name__
    ).body  # type: ignore[attr-defined]
    documented = {
        ast.unparse(key.target)
        for key, line in pairwise(body)
        if isinstance(key, ast.AnnAssign) and isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    }
    assert documented == {item.name for item in fields(node)}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.steps=0", "train.steps must be at least 1, got 0."),
        ("train.lr=0", "train.lr must be a finite number above 0, got 0.0."),
        ("train.eval_every=0", "train.eval_every must be at least 1, got 0."),
        ("model.dropout=1.5", "model.dropout must be from 0 to 1, got 1.5."),
        ("data.max_bytes=0", "data.max_bytes must be at least 1, got 0."),
        ("model.width=???", "model.width is missing; give it a value: model.width=..."),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_sentence(compose_job: Composed, override: str, text: str) -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        read(compose_job(override))
    assert str(caught.value) == text


def test_a_node_needs_keys(compose_job: Composed) -> None:
    with pytest.raises(CheckpointConfigError, match="train cannot itself be fast; set its keys"):
        read(compose_job("train=fast"))


def test_null_is_taken_where_it_means_something(compose_job: Composed) -> None:
    settings = read(compose_job("train.eval_every=null", "train.clip_norm=null")).train
    assert settings.eval_every is None and settings.clip_norm is None


def test_defaults_stand_in_the_schema_alone(compose_job: Composed) -> None:
    config = compose_job()
    assert config.train.lr == Train.lr and config.data.max_bytes == Data.max_bytes


@pytest.mark.parametrize("name", ["gpt_nano", "gpt_tiny", "gpt_small"])
def test_every_model_has_all_its_numbers(compose_job: Composed, name: str) -> None:
    values = OmegaConf.load(Path(schema.__file__).parent / "conf" / "model" / f"{name}.yaml")
    assert {item.name for item in fields(Model)} <= set(values)
    assert values.width % values.heads == 0
    assert compose_job(f"model={name}").model.layers == 2  # what is typed beats the file


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(recipe_dir().rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_composes_with_the_training_job(compose_job: Composed, path: Path) -> None:
    for kind, option in re.findall(r"override /hydra/(launcher|sweeper): (\w+)", path.read_text()):
        plugin = f"hydra_{option.partition('_')[0]}_{kind}"
        if find_spec(f"hydra_plugins.{plugin}") is None:
            with pytest.raises(CheckpointConfigError, match=f"{plugin.replace('_', '-')}, which is not installed: pip"):
                compose_job(f"+recipe={path.stem}")
            return
    config = compose_job(f"+recipe={path.stem}")
    read(config)


@pytest.mark.parametrize("path", sorted(recipe_dir().rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_says_whom_it_is_for(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    recipe = OmegaConf.load(path)
    for_our_job = bool({"train", "model", "data"} & set(recipe)) or "override /model" in path.read_text()
    assert first.startswith("# ckpt-train" if for_our_job else "# for any app")


@pytest.mark.parametrize("name", ["safest", "fastest"])
def test_a_recipe_for_any_app_needs_nothing_but_the_group_checkpoint(
    compose_job: Composed, tmp_path: Path, name: str
) -> None:
    compose_job()  # has our schemas and recipes registered, as the plugin does
    (tmp_path / "app.yaml").write_text("defaults: [checkpoint: sync, _self_]\n")
    version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    with initialize_config_dir(str(tmp_path), **version):
        config = compose("app", [f"+recipe={name}", f"hydra.searchpath=[file://{config_dir()}]"])
    assert set(config) == {"checkpoint"}
    resolve_config(config.checkpoint)
