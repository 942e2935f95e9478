"""Modify modules on import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Modifies a module.
Change = Callable[[ModuleType], None]


class ChangingFinder(MetaPathFinder):
    """Modifies modules directly after they are executed; the other finders find them.

    Args:
        changes: full name of the module -> what to do with it
    """

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of another finder, with a loader that also applies the change."""
        change = self._changes.get(fullname)
        if change is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ChangingLoader(spec.loader, change)
                return spec
        return None


class MissingModules(MetaPathFinder):
    """Provides empty modules. Must be the last finder, so that existing modules are preferred.

    Args:
        names: full name of the package or module -> its attributes
        on_unknown: creates the error for a missing attribute of a module
    """

    def __init__(
        self, names: Mapping[str, Mapping[str, Any]], on_unknown: Callable[[Sequence[str]], ImportError]
    ) -> None:
        self._names = names
        self._on_unknown = on_unknown

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an empty module."""
        if fullname not in self._names:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self._names)
        loader = _EmptyLoader(self._names[fullname], None if is_package else self._on_unknown)
        return ModuleSpec(fullname, loader, origin="ckpt_component.megatron", is_package=is_package)


class _EmptyLoader(Loader):
    def __init__(
        self, attributes: Mapping[str, Any], on_unknown: Callable[[Sequence[str]], ImportError] | None
    ) -> None:
        self._attributes = attributes
        self._on_unknown = on_unknown

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._attributes)
        on_unknown = self._on_unknown
        if on_unknown is None:
            return

        def unknown(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise on_unknown([name])

        vars(module)["__getattr__"] = unknown


class _ChangingLoader(Loader):
    def __init__(self, loader: Loader, change: Change) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Tools that inspect modules need the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._change(module)


def replace_everywhere(replacements: Mapping[int, Any]) -> None:
    """Replace module-level references in all loaded modules.

    Args:
        replacements: id of the old object -> the new object
    """
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        for name, value in list(namespace.items()):
            if id(value) in replacements:
                namespace[name] = replacements[id(value)]
