"""Hydra search-path plugin: adds `checkpoint=` and `+recipe=` to every Hydra app once the package is installed.

The build copies this file to `hydra_plugins/ckpt_component_searchpath.py`, where Hydra looks for plugins. It runs at
the start of every Hydra app in the environment, so it adds configs and nothing else, is fast, does not import torch,
and never stops the app.
"""

from __future__ import annotations

import logging

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ckpt_component.config.hydra.store import PROVIDER, config_dir, register

logger = logging.getLogger("ckpt_component")

try:
    register()
except Exception as error:  # the app may not need this package
    logger.warning("ckpt_component could not register with Hydra: %r", error)


class CkptComponentSearchPath(SearchPathPlugin):
    """Appends our configs to the search path, after those of the app."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes."""
        path = f"file://{config_dir()}"
        if all(element.path != path or element.provider != PROVIDER for element in search_path.get_path()):
            search_path.append(PROVIDER, path)
