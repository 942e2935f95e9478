"""A recipe from settings: a YAML file of the group `recipe`, as those in `recipes/` are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from ...config.errors import HydraConfigError


def recipe_path(folder: Path, name: str, replace: bool) -> Path:
    """Where a recipe goes.

    Args:
        folder: a folder of configs; the group `recipe` is a folder in it.
        name: of the recipe.
        replace: whether a file that is there may be written over.

    Raises:
        CheckpointConfigError: the name is none, or there is such a file.
    """
    if not name.replace("_", "").replace("-", "").isalnum():
        raise HydraConfigError(f"--name={name} cannot be a recipe's name; use letters, digits and _.")
    path = folder / "recipe" / f"{name}.yaml"
    if path.exists() and not replace:
        raise HydraConfigError(f"{path} exists; type another --name, or --replace to write over it.")
    return path


def write_recipe(path: Path, preset: str, settings: Mapping[str, str], notes: Sequence[str]) -> None:
    """Write the file.

    Args:
        path: from `recipe_path`.
        preset: what the settings change.
        settings: override to value: `checkpoint/writer` to `dcp`, `checkpoint.writer.workers` to `4`.
        notes: comments, a line each; the first says whom the recipe is for.

    Raises:
        CheckpointConfigError: the file cannot be written.
    """
    values = OmegaConf.from_dotlist([f"{key}={value}" for key, value in settings.items() if "/" not in key])
    # Hydra looks for the package in the first line alone.
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
