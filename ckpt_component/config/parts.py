"""Building one part from its plain config. A part of the user's is built exactly as ours are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Any

from ..spelling import closest
from .checks import HYDRA_KEYS, unknown_key_text
from .errors import CheckpointConfigError, HydraConfigError, for_hydra


def build_part(kind: str, plain: Mapping[str, Any], base: type[Any]) -> Any:
    """Build `checkpoint.<kind>`.

    Args:
        kind: stager, caller or writer; for the texts.
        plain: `_target_` and the constructor's keyword arguments. Where the constructor wants an enum, its
            member's name is enough.
        base: what the part must be: derived from it, or with all of its public methods.

    Raises:
        CheckpointConfigError: as `part_class`; or a value that the constructor refuses with ValueError or
            TypeError.
    """
    cls = part_class(kind, plain, base)
    parameters = _parameters(cls)
    values = _settings(plain)
    for key in values:
        if key in parameters:
            values[key] = _enum_member(f"checkpoint.{kind}.{key}", values[key], cls, parameters[key])
    try:
        with for_hydra():
            return cls(**values)
    except CheckpointConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise HydraConfigError(f"checkpoint.{kind}: {_full_name(cls)} refused its settings: {error}") from error


def part_class(kind: str, plain: Mapping[str, Any], base: type[Any]) -> type[Any]:
    """The class that `_target_` names, so that everything can be checked before anything is built.

    Args:
        kind: as for `build_part`.
        plain: as for `build_part`.
        base: as for `build_part`.

    Raises:
        CheckpointConfigError: the class cannot be imported (the text has the cause) or is not a `base`; a key
            that its constructor does not take, or one that it needs.
    """
    target = plain.get("_target_")
    where = f"checkpoint.{kind}._target_={target}"
    if not isinstance(target, str) or "." not in target:
        raise HydraConfigError(f"{where} is not the full name of a class, such as my_package.my_module.MyClass.")
    found = _locate(where, target)
    if not isinstance(found, type):
        raise HydraConfigError(f"{where} is a {type(found).__name__}, not a class.")
    _refuse_other_kinds(kind, found, base)
    _refuse_unfit_keys(kind, found, _settings(plain), _parameters(found))
    return found


def _locate(where: str, target: str) -> Any:
    """Import the longest module of a dotted name, and go on by attributes: classes may be nested."""
    names = target.split(".")
    for length in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:length])
        try:
            return _attribute(where, import_module(module_name), names[length:])
        except ModuleNotFoundError as error:
            if module_name != error.name and not module_name.startswith(f"{error.name}."):
                raise HydraConfigError(f"{where} cannot be imported: {module_name} needs {error.name}.") from error
            if length == 1:
                raise HydraConfigError(
                    f"{where} cannot be imported: there is no module {error.name}. Is it installed, or its "
                    "folder on PYTHONPATH?"
                ) from error
        except CheckpointConfigError:
            raise
        except Exception as error:  # a module may raise anything while it is imported
            raise HydraConfigError(
                f"{where} cannot be imported: {module_name} raised {type(error).__name__}: {error}"
            ) from error
    raise AssertionError("a dotted name has at least one module")


def _attribute(where: str, module: Any, names: Sequence[str]) -> Any:
    """What dotted names mean in a module. A room's lazy names are imported here."""
    found = module
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError as error:
            meant = closest(name, dir(found))
            hint = f" Did you mean {meant}?" if meant else ""
            raise HydraConfigError(f"{where}: {found.__name__} has no {name}.{hint}") from error
    return found


def _refuse_other_kinds(kind: str, cls: type, base: type) -> None:
    if issubclass(cls, base):
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise HydraConfigError(f"checkpoint.{kind}: {_full_name(cls)} does not define {missing}.")
        return
    wanted = [name for name, value in vars(base).items() if not name.startswith("_") and _is_behaviour(value)]
    missing = ", ".join(name for name in wanted if not hasattr(cls, name))
    if missing or not wanted:
        raise HydraConfigError(
            f"checkpoint.{kind}: {_full_name(cls)} is no {kind}: it does not derive from {_full_name(base)}"
            + (f", and has no {missing}." if missing else ".")
        )


def _is_behaviour(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, property)


def _settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if key not in HYDRA_KEYS}


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """What the constructor takes by name."""
    by_name = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
    return {name: entry for name, entry in inspect.signature(cls).parameters.items() if entry.kind in by_name}


def _refuse_unfit_keys(
    kind: str, cls: type, values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    named = {name: entry for name, entry in parameters.items() if entry.kind is not inspect.Parameter.VAR_KEYWORD}
    if len(named) == len(parameters):  # with **kwargs the class itself must say what it does not know
        for key in values:
            if key not in named:
                raise HydraConfigError(unknown_key_text(f"checkpoint.{kind}.{key}", key, list(named)))
    for name, entry in named.items():
        if entry.default is inspect.Parameter.empty and name not in values:
            raise HydraConfigError(f"checkpoint.{kind}.{name} is missing; {_full_name(cls)} needs it.")


def _enum_member(full_key: str, value: Any, cls: type, parameter: inspect.Parameter) -> Any:
    """The member that a text names, where the constructor's default or annotation is an enum."""
    wanted = parameter.annotation
    if isinstance(wanted, str):  # `from __future__ import annotations`
        wanted = getattr(inspect.getmodule(cls), wanted, None)
    if isinstance(parameter.default, Enum):
        wanted = type(parameter.default)
    if not (isinstance(wanted, type) and issubclass(wanted, Enum)) or not isinstance(value, str):
        return value
    if value not in wanted.__members__:
        raise HydraConfigError(f"{full_key} must be {', '.join(wanted.__members__)}, got {value}.")
    return wanted[value]


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
