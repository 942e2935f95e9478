"""Hydra search-path plugin: installing the package brings `checkpoint=` and `+recipe=` to every Hydra app.

When the package is built this file becomes `hydra_plugins/ckpt_component_searchpath.py`, where Hydra looks
for plugins. It runs at the start of every Hydra app in the environment, so it is quick, imports no torch, and
never stops the app.
"""

from __future__ import annotations

import logging

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ckpt_component.config.store import PROVIDER, config_dir, register

logger = logging.getLogger("ckpt_component")

try:
    register()
    from ckpt_component.config.hints import install  # knows Hydra's insides, which may be others in a later release

    install()
except Exception as error:  # the app may well need none of it
    logger.warning("ckpt_component could not register with Hydra: %r", error)


class CkptComponentSearchPath(SearchPathPlugin):
    """Appends our configs, so that those of the app come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes."""
        path = f"file://{config_dir()}"
        if all(element.path != path or element.provider != PROVIDER for element in search_path.get_path()):
            search_path.append(PROVIDER, path)
