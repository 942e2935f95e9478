"""Replace Hydra's texts for refused overrides by better ones, in every Hydra app.

Hydra has no hook for this, so its methods that compose a run or a job of a sweep are wrapped. The search-path plugin
does so when an app starts. Errors without a known cause, or about other keys and groups than ours, stay unchanged.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf

from ..schema import Checkpoint
from .composable import composable
from .errors import CheckpointConfigError, HydraConfigError
from .explain import OURS, added_twice, what_was_meant

logger = logging.getLogger("ckpt_component")

#: Explain overrides of these keys and groups; None: of all.
_roots: ContextVar[Sequence[str] | None] = ContextVar("roots", default=OURS)
#: Set while an explanation composes configs itself.
_explaining: ContextVar[bool] = ContextVar("explaining", default=False)


def install() -> None:
    """Wrap Hydra's methods so that their errors are explained; does nothing if they are wrapped."""
    _wrap(Hydra, "compose_config", lambda bound: (bound["config_name"], bound["overrides"]))
    if hasattr(ConfigLoaderImpl, "parse_overrides"):  # Hydra 1.4 reads what was typed before it composes
        _wrap(ConfigLoaderImpl, "parse_overrides", lambda bound: (bound["config_name"], bound["overrides"]))
    # The overrides of one job of a sweep.
    _wrap(
        ConfigLoaderImpl,
        "load_sweep_config",
        lambda bound: (bound["master_config"].hydra.job.config_name, bound["sweep_overrides"]),
    )


@contextmanager
def override_hints() -> Iterator[None]:
    """Explain all overrides that Hydra refuses in the `with` block, not only those of `checkpoint`.

    For your own app: `with override_hints(): main()`.
    """
    install()
    token = _roots.set(None)
    try:
        yield
    finally:
        _roots.reset(token)


@contextmanager
def command_line(roots: Sequence[str]) -> Iterator[None]:
    """As `override_hints`, for a command: also refuses overrides with dashes in front.

    Args:
        roots: The keys and groups of the command.
    """
    _refuse_dashes(sys.argv[1:], roots)
    try:
        with override_hints():
            yield
    except CheckpointConfigError as error:  # `--info` composes where Hydra reports no errors
        sys.exit(str(error))


def _refuse_dashes(words: Sequence[str], roots: Sequence[str]) -> None:
    for number, word in enumerate(words):
        option = re.fullmatch(r"--?((\w+)[\w./]*)(?:=(.*))?", word)
        if option and option[2] in roots:
            value = option[3] if option[3] is not None else "".join(words[number + 1 : number + 2]) or "..."
            sys.exit(f"{word}: an override has no dashes. Did you mean {option[1]}={value}?")


def _wrap(owner: type, name: str, typed_in: Callable[[dict[str, Any]], tuple[str | None, list[str]]]) -> None:
    """Wrap a method of Hydra so that refused overrides are explained; `typed_in` extracts them from its arguments."""
    original: Callable[..., Any] = getattr(owner, name)
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def explaining(*positional: Any, **keywords: Any) -> Any:
        if _explaining.get():
            return original(*positional, **keywords)
        config, error = None, None
        token = _explaining.set(True)
        try:
            try:
                config = original(*positional, **keywords)
            except Exception as failure:
                error = failure
            text = better_text(config, error, positional, keywords)
        finally:
            _explaining.reset(token)
        if text:
            raise HydraConfigError(text)
        if error is not None:
            raise error
        return config

    def better_text(
        config: Any, error: Exception | None, positional: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> str | None:
        """The text to raise instead, or None. Never fails itself, whatever the version of Hydra."""
        try:
            config_name, overrides = typed_in(signature.bind(*positional, **keywords).arguments)
            if error is None:
                return _added_silently(config, overrides, config_name)
            return what_was_meant(error, overrides, config_name, _roots.get())
        except Exception as failure:
            logger.warning("ckpt_component could not look for a better text than Hydra's: %r", failure)
            return None

    setattr(owner, name, explaining)


def _added_silently(config: Any, overrides: Sequence[str], config_name: str | None) -> str | None:
    """The text for `+checkpoint=...` in an app that already has this group, whose settings it silently overrides."""
    if not isinstance(config, DictConfig):
        return None
    for number, text in enumerate(overrides):
        group, _, value = text.removeprefix("+").partition("=")
        if config_name is None or not text.startswith("+") or group.partition("/")[0] != "checkpoint" or "." in group:
            continue
        node = OmegaConf.select(config, "checkpoint", throw_on_missing=False, throw_on_resolution_failure=False)
        if not isinstance(node, DictConfig) or OmegaConf.get_type(node) is not composable(Checkpoint):
            continue
        without = compose(config_name, [*overrides[:number], *overrides[number + 1 :]], return_hydra_config=True)
        if group in without.hydra.runtime.choices:
            return added_twice(group, value)
    return None
