"""Checks of what is installed: versions, optional packages, and the Hydra plugin. Imports none of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement  # a dependency of hydra-core

from .finding import FAILS, NOTE, OK, Finding

_NAME = "ckpt_component"


def check_packages() -> Iterator[Finding]:
    """Check the versions of what is needed, and list what is optional."""
    try:
        requirements = [Requirement(line) for line in metadata.requires(_NAME) or []]
    except metadata.PackageNotFoundError:
        text = "ckpt_component is on the path and not installed, so Hydra apps do not find its configs"
        yield Finding("installation", NOTE, text, "pip install -e . in its folder")
        return
    optional: dict[str, str | None] = {}
    for needed in requirements:
        version, marker = _version(needed.name), needed.marker
        if marker is not None and not marker.evaluate({"extra": ""}):
            if not marker.evaluate({"extra": "test"}):
                optional[needed.name] = version
        elif version is None or not needed.specifier.contains(version, prereleases=True):
            text = f"{version or 'not installed'}, and {needed} is needed"
            yield Finding(needed.name, FAILS, text, f"pip install '{needed}'")
        else:
            yield Finding(needed.name, OK, version)
    yield _plugin()
    installed = [f"{name} {version}" for name, version in sorted(optional.items()) if version]
    yield Finding("optional packages", OK, ", ".join(installed) or "none")
    missing = [name for name, version in sorted(optional.items()) if not version]
    yield Finding("not installed", OK, ", ".join(missing) or "none")


def _plugin() -> Finding:
    if importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{_NAME}_searchpath"):
        return Finding("Hydra plugin", OK, "every Hydra app has checkpoint=... and +recipe=...")
    text = "not found: Hydra apps do not have the group checkpoint"
    return Finding("Hydra plugin", NOTE, text, "install the package again: pip install -e .")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
