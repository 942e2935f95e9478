"""Checks of what is installed: versions, optional packages, and the Hydra plugin. Imports none of it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement  # a dependency of hydra-core

from .finding import FAILS, NOTE, OK, Finding

_NAME = "ckpt_component"
#: With "1", torchrun gives each start of the ranks a store of its own.
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


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
    if version := _version("torch"):
        yield _restarts(version)
    yield _plugin()
    installed = [f"{name} {version}" for name, version in sorted(optional.items()) if version]
    yield Finding("optional packages", OK, ", ".join(installed) or "none")
    missing = [name for name, version in sorted(optional.items()) if not version]
    yield Finding("not installed", OK, ", ".join(missing) or "none")


def _restarts(version: str) -> Finding:
    """Whether ranks that torchrun restarts can connect.

    In torch 2.7 to 2.14, and later ones that were not tried, the ranks of each start use the store of the torchrun
    agent, without a prefix: a process group may read there at which addresses the ranks listened before. Static
    rendezvous always does it; that of etcd never.
    """
    what, shares = "torchrun restarts", os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if shares == "False" or (shares is None and os.environ.get(_OWN_STORE) == "1"):
        return Finding(what, OK, "each start of the ranks has a store of its own")
    backend = "with several hosts also --rdzv-backend=c10d"
    if shares is not None and os.environ.get(_OWN_STORE) == "1":
        text = f"static rendezvous does not heed {_OWN_STORE}, so restarted ranks may not connect"
        return Finding(what, NOTE, text, "torchrun --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT")
    text = f"torch {version}: restarted ranks find old addresses in torchrun's store, and may not connect"
    return Finding(what, NOTE, text, f"export {_OWN_STORE}=1 before torchrun; {backend}")


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
