"""Write settings as a recipe: a YAML file of the group `recipe`, like those in `recipes/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from ckpt_component.config.hydra.hydra_errors import HydraConfigError


def recipe_path(folder: Path, name: str, replace: bool) -> Path:
    """The path of a recipe.

    Args:
        folder: folder of configs, in which the group `recipe` is a folder
        name: name of the recipe
        replace: whether an existing file may be overwritten

    Raises:
        CheckpointConfigError: the name is invalid, or the file exists
    """
    if not name.replace("_", "").replace("-", "").isalnum():
        raise HydraConfigError(f"--name={name} cannot be a recipe's name; use letters, digits and _.")
    path = folder / "recipe" / f"{name}.yaml"
    if path.exists() and not replace:
        raise HydraConfigError(f"{path} exists; type another --name, or --replace to overwrite it.")
    return path


def write_recipe(path: Path, preset: str, settings: Mapping[str, str], notes: Sequence[str]) -> None:
    """Write the file.

    Args:
        path: from `recipe_path`
        preset: preset that the settings modify
        settings: override -> value, such as `checkpoint/writer` -> `dcp`, `checkpoint.writer.workers` -> `4`
        notes: comments, one line each; the first says what the recipe is for

    Raises:
        CheckpointConfigError: the file cannot be written
    """
    values = OmegaConf.from_dotlist([f"{key}={value}" for key, value in settings.items() if "/" not in key])
    # Hydra looks for the package only in the first line.
    lines = ["# @package _global_", *(f"# {note}" for note in notes), "defaults:"]
    lines.append(f"  - override /checkpoint: {preset}")
    lines += [f"  - override /{key}: {value}" for key, value in settings.items() if "/" in key]
    text = "\n".join(lines) + "\n" + (f"\n{OmegaConf.to_yaml(values)}" if values else "")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HydraConfigError(
            f"{path} cannot be written ({error.strerror}); type another --conf or --name."
        ) from error
