"""The folders of our configs, and their registration with Hydra."""

from __future__ import annotations

import logging
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from .composable import composable
from .schema import PARTS, Checkpoint

logger = logging.getLogger("ckpt_component")

#: Our name in Hydra's search path and config store.
PROVIDER = "ckpt-component"
#: The group of the schemas, separate from the groups for users.
SCHEMAS = "ckpt_component/schema"


def config_dir() -> Path:
    """The folder of Hydra configs: in the package if installed from a wheel, else in the checkout."""
    return _beside_the_code("conf", "checkpoint/async_persistent.yaml")


def recipe_dir() -> Path:
    """The folder of recipes, which Hydra knows as the group `recipe`."""
    return _beside_the_code("recipes", "")


def register() -> None:
    """Register the schemas and recipes with Hydra; does nothing if they are registered."""
    if registered("checkpoint"):
        return
    store = ConfigStore.instance()
    store.store(group=SCHEMAS, name="checkpoint", node=composable(Checkpoint), provider=PROVIDER)
    for kind, options in PARTS.items():
        for option, schema in options.items():
            store.store(group=f"{SCHEMAS}/{kind}", name=option, node=composable(schema), provider=PROVIDER)
    # In the config store, files need no `# @package` line, and the group can differ from the folder's name.
    store_files(recipe_dir(), "recipe", "_global_")


def registered(schema: str) -> bool:
    """Whether a schema is registered; Hydra 1.4 warns if something is stored twice."""
    return f"{schema}.yaml" in ConfigStore.instance().repo.get("ckpt_component", {}).get("schema", {})


def store_files(folder: Path, group: str | None, package: str | None = None) -> None:
    """Register the YAML files of a folder as options of a group; None: as primary configs."""
    store = ConfigStore.instance()
    for path in sorted(folder.glob("*.yaml")):
        try:
            node = OmegaConf.load(path)
        except Exception as error:  # a broken file must not stop the apps that do not use it
            logger.warning("%s cannot be read and is ignored: %s", path, error)
            continue
        store.store(group=group, name=path.stem, node=node, package=package, provider=PROVIDER)


def _beside_the_code(name: str, landmark: str) -> Path:
    package = Path(__file__).resolve().parent.parent
    # An editable install leaves a stale copy in site-packages, not beside this file: the checkout wins.
    installed, checkout = package / name, package.parent / name
    return installed if (installed / landmark).exists() else checkout
