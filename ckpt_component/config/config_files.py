"""The YAML files of presets and recipes: where they are, and what they say. Imports neither Hydra nor OmegaConf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .schema import PARTS


@dataclass(frozen=True)
class ConfigFile:
    """A preset or a recipe.

    Attributes:
        name: as it is typed: `checkpoint=NAME`, `+recipe=NAME`
        line: what it is for, the first line of the file
        path: the file
    """

    name: str
    line: str
    path: Path


def config_dir() -> Path:
    """The folder of Hydra configs: in the package if installed from a wheel, else in the checkout."""
    return _beside_the_code("conf", "checkpoint/async_persistent.yaml")


def recipe_dir() -> Path:
    """The folder of recipes, which Hydra knows as the group `recipe`."""
    return _beside_the_code("recipes", "")


def presets() -> list[ConfigFile]:
    """Our presets, the group `checkpoint`."""
    return list(_files(config_dir() / "checkpoint"))


def recipes() -> list[ConfigFile]:
    """Our recipes, those for any app first and then those for `ckpt-train`, whose folder is `train`."""
    return [*_files(recipe_dir()), *_files(recipe_dir() / "train")]


def parts_of(preset: str) -> dict[str, str]:
    """The parts that one of our presets picks: `{"stager": "pinned", ...}`.

    Our presets name each other and their parts in their defaults list, and nothing else decides; `compose_checkpoint`
    asks Hydra, which takes a third of a second.
    """
    import yaml

    content: dict[str, Any] = yaml.safe_load((config_dir() / "checkpoint" / f"{preset}.yaml").read_text("utf-8"))
    parts: dict[str, str] = {}
    for entry in content["defaults"]:
        if isinstance(entry, dict):
            picked = {key.removeprefix("override "): str(option) for key, option in entry.items()}
            parts |= {group: option for group, option in picked.items() if group in PARTS}
        elif entry != "_self_" and not entry.startswith("/"):
            parts |= parts_of(entry)
    return parts


def _files(folder: Path) -> Iterator[ConfigFile]:
    for path in sorted(folder.glob("*.yaml")):
        with path.open(encoding="utf-8") as lines:
            yield ConfigFile(path.stem, lines.readline().lstrip("# ").rstrip(), path)


def _beside_the_code(name: str, landmark: str) -> Path:
    package = Path(__file__).resolve().parent.parent
    # An editable install leaves a stale copy in site-packages, not beside this file: the checkout wins.
    installed, checkout = package / name, package.parent / name
    return installed if (installed / landmark).exists() else checkout
