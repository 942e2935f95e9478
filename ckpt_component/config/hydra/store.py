"""Registration of our schemas and recipes with Hydra."""

from __future__ import annotations

import logging
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from ..config_files import (
    config_dir as config_dir,  # the installed search-path plugin imports it from here
    recipe_dir,
)
from ..schema import PARTS, SETTINGS, Checkpoint
from .composable import composable

logger = logging.getLogger("ckpt_component")

#: Our name in Hydra's search path and config store.
PROVIDER = "ckpt-component"
#: The group of the schemas, separate from the groups for users.
SCHEMAS = "ckpt_component/schema"


def register() -> None:
    """Register the schemas and recipes with Hydra; does nothing if they are registered."""
    if registered("checkpoint"):
        return
    store = ConfigStore.instance()
    store.store(group=SCHEMAS, name="checkpoint", node=composable(Checkpoint), provider=PROVIDER)
    for kind, options in PARTS.items():
        for option, schema in options.items():
            store.store(group=f"{SCHEMAS}/{kind}", name=option, node=composable(schema), provider=PROVIDER)
    for name, settings in SETTINGS.items():
        store.store(group=SCHEMAS, name=name, node=composable(settings), provider=PROVIDER)
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
