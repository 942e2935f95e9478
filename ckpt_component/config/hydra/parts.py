"""Build one part from its plain config. A user's part is built exactly as our own."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from hydra._internal.utils import _locate as locate  # `hydra.utils.get_class` also logs the error

from ...core.spelling import closest, invalid_choice
from ...events import CheckpointListener
from .checks import HYDRA_KEYS
from .composable import is_enum
from .explain import unknown_key_of
from .hydra_errors import CheckpointConfigError, HydraConfigError, for_hydra


def build_part(kind: str, plain: Mapping[str, Any], base: type[Any]) -> Any:
    """Build `checkpoint.<kind>`.

    Args:
        kind: stager, caller or writer; for error texts
        plain: `_target_` and the constructor's keyword arguments. Enum members may be given by name.
        base: the class that the part must derive from, or whose public methods it must have

    Raises:
        CheckpointConfigError: as `part_class` and `construct_part`
    """
    return construct_part(kind, part_class(kind, plain, base), plain)


def part_class(kind: str, plain: Mapping[str, Any], base: type[Any]) -> type[Any]:
    """Import and check the class of `_target_`, so that all parts can be checked before any is built.

    Args:
        kind: as for `build_part`
        plain: as for `build_part`
        base: as for `build_part`

    Raises:
        CheckpointConfigError: the class cannot be imported (the text has the cause) or is not a `base`; or a key is
            unknown to its constructor or missing
    """
    target = plain.get("_target_")
    where = f"checkpoint.{kind}._target_={target}"
    if not isinstance(target, str) or "." not in target:
        raise HydraConfigError(f"{where} is not the full name of a class, such as my_package.my_module.MyClass.")
    cls = _located(where, target)
    if not isinstance(cls, type):
        raise HydraConfigError(f"{where} is a {type(cls).__name__}, not a class.")
    _refuse_other_kinds(kind, cls, base)
    _refuse_unfit_keys(kind, cls, _settings(plain), _parameters(cls))
    return cls


def construct_part(kind: str, cls: type, plain: Mapping[str, Any]) -> Any:
    """Build a part whose class and keys `part_class` has checked.

    Args:
        kind: as for `build_part`
        cls: what `part_class` returned
        plain: as for `build_part`

    Raises:
        CheckpointConfigError: the constructor refuses a value with ValueError or TypeError
    """
    parameters, values = _parameters(cls), _settings(plain)
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


def _located(where: str, target: str) -> Any:
    """Import a dotted name as Hydra does; the error text says which part of the name is wrong."""
    try:
        return _own(target) if target.startswith("ckpt_component.") else locate(target)
    except Exception as error:  # a module may raise anything while it is imported
        # Hydra's own error has no name, and the cause says more.
        cause = error if getattr(error, "name", None) else error.__cause__ or error
        raise HydraConfigError(_not_located(where, target, cause)) from cause


@functools.cache
def _own(target: str) -> Any:
    """What a name of this package is; that of another one may change, as its module is imported again."""
    return locate(target)


def _not_located(where: str, target: str, cause: BaseException) -> str:
    missing = str(getattr(cause, "name", None))
    of_target = isinstance(cause, AttributeError) and missing in target.split(".")  # else a module's own failure
    if not isinstance(cause, ModuleNotFoundError) and not of_target:
        return f"{where} cannot be imported: {type(cause).__name__}: {cause}"
    if isinstance(cause, AttributeError):
        owner: Any = cause.obj
        name = missing
    elif not f"{target}.".startswith(f"{missing}."):
        return f"{where} cannot be imported: it needs {missing}, which is not installed."
    elif "." not in missing:
        return (
            f"{where} cannot be imported: there is no module {missing}. Is it installed, or its folder on PYTHONPATH?"
        )
    else:
        parent, _, name = missing.rpartition(".")
        owner = sys.modules[parent]
    guess = closest(name, dir(owner))
    hint = f" Did you mean {guess}?" if guess else ""
    return f"{where}: {owner.__name__} has no {name}.{hint}"


def _refuse_other_kinds(kind: str, cls: type, base: type) -> None:
    if issubclass(cls, base):
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise HydraConfigError(f"checkpoint.{kind}: {_full_name(cls)} does not define {missing}.")
        return
    methods = [
        name
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    ]
    missing = ", ".join(name for name in methods if not hasattr(cls, name))
    if missing or not methods:
        raise HydraConfigError(
            f"checkpoint.{kind}: {_full_name(cls)} is not a {kind}: it does not derive from {_full_name(base)}"
            + (f", and has no {missing}." if missing else ".")
        )


def _settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if key not in HYDRA_KEYS}


@functools.cache
def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """The constructor's parameters that can be passed by name."""
    by_name = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
    return {name: entry for name, entry in inspect.signature(cls).parameters.items() if entry.kind in by_name}


def _refuse_unfit_keys(
    kind: str, cls: type, values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    by_key = {name: entry for name, entry in parameters.items() if entry.kind is not inspect.Parameter.VAR_KEYWORD}
    if len(by_key) == len(parameters):  # with **kwargs the class itself must refuse unknown keys
        for key in values:
            if key not in by_key:
                raise HydraConfigError(unknown_key_of(f"checkpoint.{kind}", key, list(by_key)))
    for name, entry in by_key.items():
        if entry.default is inspect.Parameter.empty and name not in values:
            raise HydraConfigError(f"checkpoint.{kind}.{name} is missing; {_full_name(cls)} needs it.")


def _enum_member(full_key: str, value: Any, cls: type, parameter: inspect.Parameter) -> Any:
    """The enum member of this name, if the parameter's default or annotation is an enum; else the value."""
    enum = parameter.annotation
    if isinstance(enum, str):  # `from __future__ import annotations`
        enum = getattr(inspect.getmodule(cls), enum, None)
    if isinstance(parameter.default, Enum):
        enum = type(parameter.default)
    if not is_enum(enum) or not isinstance(value, str):
        return value
    if value not in enum.__members__:
        raise HydraConfigError(invalid_choice(full_key, value, list(enum.__members__)))
    return enum[value]


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


#: Name in `checkpoint.listeners` -> class.
LISTENERS = {
    "tensorboard": "ckpt_component.events.tensorboard.TensorBoardListener",
    "wandb": "ckpt_component.events.wandb.WandbListener",
    "mlflow": "ckpt_component.events.mlflow.MlflowListener",
    "opentelemetry": "ckpt_component.events.opentelemetry.OpenTelemetryListener",
}


def build_listeners(entries: Sequence[Any]) -> list[CheckpointListener]:
    """Build the listeners of a config.

    Raises:
        CheckpointConfigError: an entry is not a listener, or its package is not installed
    """
    listeners = []
    for number, entry in enumerate(entries):
        if isinstance(entry, str) and entry not in LISTENERS:
            raise HydraConfigError(invalid_choice("checkpoint.listeners", entry, list(LISTENERS), form="{}=[{}]"))
        if not isinstance(entry, (str, Mapping)):
            raise HydraConfigError(
                f"checkpoint.listeners has {entry!r:.200}; give names ({', '.join(LISTENERS)}) or dicts with _target_. "
                "An object is passed to manager.add_listener()."
            )
        plain = {"_target_": LISTENERS[entry]} if isinstance(entry, str) else entry
        listeners.append(build_part(f"listeners.{number}", plain, CheckpointListener))
    return listeners
