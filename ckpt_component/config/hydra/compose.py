"""Compose a checkpoint config outside or inside a Hydra app."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config_files import config_dir
from .checks import refuse_text_parts
from .explain import without_noise
from .hints import override_hints
from .hydra_errors import CheckpointConfigError, HydraConfigError, brief_refusals
from .overrides import parse_override, torn_apart
from .store import PROVIDER, register


@brief_refusals
def compose_checkpoint(preset: str = "async_persistent", overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the `checkpoint` config as a Hydra app would.

    Works in argparse scripts, in notebooks, and inside a running Hydra app, whose own presets and parts can then be
    used. Not thread-safe: Hydra's state is global.

    Args:
        preset: a file of the group `checkpoint`
        overrides: as on the command line: `checkpoint.writer.workers=4` sets a value,
            `checkpoint/stager=pinned` picks a part

    Returns:
        The config below `checkpoint`, for `build_checkpointer` or `build_manager`.

    Raises:
        CheckpointConfigError: an override is invalid; the text says what to type instead
    """
    request = [f"+checkpoint={preset}", *checked_overrides(overrides)]
    torn = torn_apart(request)
    if torn:
        raise HydraConfigError(torn)
    for text in request:
        parse_override(text, several=False)
    with hydra_session():
        config: DictConfig = _compose(request).checkpoint
    refuse_text_parts(plain_dict(config, resolve=False))
    return config


def compose_option(group: str, option: str) -> dict[str, Any]:
    """What `checkpoint/<group>=<option>` sets, as plain dicts with enums as strings.

    Raises:
        CheckpointConfigError: there is no such option; the text lists those that are
    """
    with hydra_session():
        settings = _compose([f"+checkpoint/{group}={option}"]).checkpoint[group]
    return plain_dict(settings, resolve=True)


def plain_dict(node: Any, resolve: bool) -> dict[str, Any]:
    """A mapping node as nested dicts and lists, enums as strings."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=resolve, enum_to_str=True))


def checked_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides as a list; refuses a single string, whose characters would be taken for overrides."""
    if isinstance(overrides, str):
        if "=" not in overrides:
            raise HydraConfigError(
                f"overrides must be a list, not {overrides!r}; for a folder, type dir={overrides!r}."
            )
        raise HydraConfigError(f"overrides must be a list, such as [{overrides!r}], not a string.")
    if isinstance(overrides, Mapping):
        usual = [f"{key}={value}" for key, value in overrides.items()]
        raise HydraConfigError(f"overrides must be a list, such as {usual!r:.200}, not a dict.")
    return list(overrides)


@contextmanager
def hydra_session() -> Iterator[None]:
    """Initialize Hydra for the `with` block, or use a running app that sees our configs; restores Hydra's state."""
    register()
    current = GlobalHydra.instance()
    running = current.hydra
    if running is not None and _sees_our_configs(current):
        yield
        return
    # Hydra 1.3 needs version_base; 1.4 warns about it.
    version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    current.clear()
    try:
        with initialize_config_dir(str(config_dir()), job_name="ckpt_component", **version):
            yield
    finally:
        # `initialize_config_dir` restores a copy of the singleton; a running app needs its own instance.
        if running is not None:
            GlobalHydra.set_instance(current)
            current.hydra = running


def _sees_our_configs(current: GlobalHydra) -> bool:
    """False if the package is on `PYTHONPATH` but not installed: Hydra does not find the plugin then."""
    folder = f"file://{config_dir()}"
    path = current.config_loader().get_search_path().get_path()
    return any(element.provider == PROVIDER or element.path == folder for element in path)


def _compose(request: list[str]) -> DictConfig:
    try:
        with override_hints():
            return compose(overrides=request)
    except CheckpointConfigError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        # The text includes the cause, whose long traceback would be Hydra's.
        raise HydraConfigError(without_noise(error)) from None
