"""Import the names of a package on first use: neither Hydra's plugin nor the writer process pays for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .gc_control import collector_paused


def lazy(package: str, homes: dict[str, str]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Create `__all__`, `__getattr__` and `__dir__` for a package.

    Args:
        package: its `__name__`
        homes: module, relative to the package -> the names it provides, separated by spaces
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            with collector_paused():
                module = import_module(home_of[name], package)
        except AttributeError as error:  # as it is, it would say that this package has no such name
            text = f"{error}; if an import was interrupted before, restart Python"
            raise ImportError(f"{package}.{name} cannot be imported: {text}", name=package) from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)  # later accesses bypass this function
        return value

    return sorted(home_of), load, lambda: sorted({*vars(sys.modules[package]), *home_of})
