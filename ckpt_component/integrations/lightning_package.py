"""The Lightning package that a script uses: `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _package() -> ModuleType:
    """The package that is imported already, else the first that is installed: their classes are not exchangeable."""
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("ckpt_component.integrations.lightning needs Lightning: pip install 'lightning>=2.6' numpy")


PACKAGE = _package()


def fabric(name: str) -> ModuleType:
    """A module of the lower half of the package: `utilities` for `lightning.fabric.utilities`."""
    lower = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    return import_module(f"{lower[PACKAGE.__name__]}.{name}")


def part(name: str) -> ModuleType:
    """A module of the package: `callbacks` for `lightning.pytorch.callbacks`."""
    return import_module(f"{PACKAGE.__name__}.{name}")
