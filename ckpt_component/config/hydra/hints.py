"""Replace Hydra's texts for refused overrides by better ones, in our commands and in apps that ask for it.

Hydra has no hook for this, so its methods that compose a run or a job of a sweep are wrapped while a `with` block runs.
Errors without a known cause stay unchanged.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf

from ..schema import Checkpoint
from .composable import composable
from .explain import added_twice, what_was_meant
from .hydra_errors import CheckpointConfigError, HydraConfigError

logger = logging.getLogger("ckpt_component")

#: Extracts the name of the primary config and the overrides from the arguments of a method.
TypedIn = Callable[[dict[str, Any]], tuple[str | None, list[str]]]

#: Hydra's methods that compose: a run, what was typed before it is composed (Hydra 1.4), and one job of a sweep.
_COMPOSING: tuple[tuple[type, str, TypedIn], ...] = (
    (Hydra, "compose_config", lambda bound: (bound["config_name"], bound["overrides"])),
    (ConfigLoaderImpl, "parse_overrides", lambda bound: (bound["config_name"], bound["overrides"])),
    (
        ConfigLoaderImpl,
        "load_sweep_config",
        lambda bound: (bound["master_config"].hydra.job.config_name, bound["sweep_overrides"]),
    ),
)

#: Set while a method is explained: those that it calls, and what the explanation composes itself, are not.
_explaining: ContextVar[bool] = ContextVar("explaining", default=False)


@contextmanager
def override_hints() -> Iterator[None]:
    """Explain the overrides that Hydra refuses while the `with` block runs.

    For your own app: `with override_hints(): main()`, or `@override_hints()` above `@hydra.main(...)`. Not thread-safe:
    it changes methods of Hydra until the block ends.
    """
    with ExitStack() as wrapped:
        for owner, name, typed_in in _COMPOSING:
            if hasattr(owner, name):
                wrapped.enter_context(_explained(owner, name, typed_in))
        yield


@contextmanager
def command_line(roots: Sequence[str]) -> Iterator[None]:
    """As `override_hints`, for a command: also refuses overrides with dashes in front.

    Args:
        roots: the keys and groups of the command
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
            plus = "+" * (option[2] == "recipe")  # which no command has in its defaults list
            value = option[3] if option[3] is not None else "".join(words[number + 1 : number + 2]) or "..."
            sys.exit(f"{word}: an override has no dashes. Did you mean {plus}{option[1]}={value}?")


@contextmanager
def _explained(owner: type, name: str, typed_in: TypedIn) -> Iterator[None]:
    """Wrap a method of Hydra so that refused overrides are explained."""
    original: Callable[..., Any] = getattr(owner, name)
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
            return what_was_meant(error, overrides, config_name)
        except Exception as failure:
            logger.warning("ckpt_component could not look for a better text than Hydra's: %r", failure)
            return None

    setattr(owner, name, explaining)
    try:
        yield
    finally:
        setattr(owner, name, original)


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
