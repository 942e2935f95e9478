"""Make Megatron, Megatron-Bridge and NVRx use the asynchronous saves of this package.

Megatron imports its async classes from modules of NVRx or from its own, in `get_async_strategy` when it is called, or
at the top of its modules. So our names are set in those modules: this works for all these releases, before and after
they are imported, and for both values of `--async-strategy`. Without NVRx, empty modules are provided in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .args import MegatronSettings, check_overrides, megatron_args, read_settings
from .strategy import async_names, plan_as_megatron
from .taken_names import NAMES, names_taken_by, unknown_names

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


_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
_MEGATRON = "megatron.core.dist_checkpointing.strategies"
#: The modules of NVRx and the names to set in them.
HOMES = {
    f"{_NVRX}.core": ("AsyncCallsQueue", "AsyncRequest"),
    f"{_NVRX}.cached_metadata_filesystem_reader": ("CachedMetadataFileSystemReader",),
    f"{_NVRX}.filesystem_async": ("FileSystemWriterAsync", "_results_queue", "get_write_results_queue"),
    f"{_NVRX}.state_dict_saver": (
        "CheckpointMetadataCache",
        "save_state_dict_async_finalize",
        "save_state_dict_async_plan",
    ),
}
#: Version of the empty package: the NVRx release with these names.
_NVRX_VERSION = "0.7.0+ckpt.component"


def install(overrides: Sequence[str] = ()) -> None:
    """Make Megatron in this process save with this package. Call it before training starts; once is enough.

    Megatron's options keep their meaning. `--async-strategy nvrx` and `mcore` are both accepted and both use this
    package.

    Args:
        overrides: config overrides, such as `checkpoint.timeouts.write=1h`; they take precedence over Megatron's
            options

    Raises:
        CheckpointConfigError: an override is invalid, or has no effect in Megatron's training loop
        MegatronNameError: Megatron is already imported and takes a name that this package does not provide
    """
    check_overrides(overrides)
    if any(isinstance(finder, ChangingFinder) for finder in sys.meta_path):
        return
    ours = async_names(partial(_settings, {}, overrides))
    as_megatron = {
        **ours,
        "save_state_dict_async_plan": plan_as_megatron(ours["save_state_dict_async_plan"]),
    }
    changes: dict[str, Change] = {f"{_MEGATRON}.torch": _check_names}  # first, so that nothing is changed if it raises
    for module, names in HOMES.items():
        changes[module] = partial(_set_names, {name: ours[name] for name in names})
        own = {name: as_megatron[name] for name in names if name != "CheckpointMetadataCache"}
        file = module.rpartition(".")[2].replace("core", "async_utils")
        changes[f"{_MEGATRON}.{file}"] = partial(_set_names, own)
    changes[f"{_MEGATRON}.nvrx"] = partial(_set_names, {"has_nvrx_async_support": _has_nvrx_async_support})
    changes["megatron.bridge.utils.instantiate_utils"] = _allow_targets
    loaded = [name for name in changes if name in sys.modules]
    for name in loaded:
        changes[name](sys.modules[name])
    sys.meta_path.insert(0, ChangingFinder(changes))
    sys.meta_path.append(MissingModules(_stand_ins(), unknown_names))


def _settings(known: dict[int, MegatronSettings], overrides: Sequence[str]) -> MegatronSettings:
    """Read the settings once before and once after Megatron has parsed its options."""
    args = megatron_args()
    if id(args) not in known:
        known[id(args)] = read_settings(args, overrides)
    return known[id(args)]


def _stand_ins() -> dict[str, dict[str, Any]]:
    packages = [_NVRX]
    while "." in packages[-1]:
        packages.append(packages[-1].rpartition(".")[0])
    names: dict[str, dict[str, Any]] = {name: {} for name in (*packages, *HOMES)}
    names[packages[-1]] = {"__version__": _NVRX_VERSION}
    return names


def _set_names(values: Mapping[str, Any], module: ModuleType) -> None:
    before = {name: vars(module).get(name) for name in values}
    vars(module).update(values)
    # Other modules may have imported the previous objects by name.
    replace_everywhere({id(old): values[name] for name, old in before.items() if old is not None})


def _has_nvrx_async_support() -> bool:
    """Replaces Megatron's check for an installed NVRx."""
    return True


def _check_names(module: ModuleType) -> None:
    """Refuse a Megatron that takes other names than ours."""
    taken = names_taken_by(getattr(module, "get_async_strategy", None))
    unknown = {name for name in taken if name not in NAMES}
    if unknown:
        raise unknown_names(unknown)
    by_name = "FileSystemWriterAsync" in vars(module)  # megatron-core before 0.17
    if not taken and not by_name and "make_nvrx_async_request" not in vars(module):
        raise unknown_names(["unknown classes"])
    if "HAVE_NVRX" in vars(module):
        vars(module)["HAVE_NVRX"] = True


def _allow_targets(module: ModuleType) -> None:
    """Allow `checkpoint.custom_manager_class` of Bridge to name a class of this package."""
    allow = getattr(module, "register_allowed_target_prefix", None)
    if allow is not None:
        allow("ckpt_component.")
