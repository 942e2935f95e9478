"""The composed config as checkpoints store it: whole, with interpolations, with their values, and without secrets.

Two kinds of values are not stored:

- The value of a key that looks like a credential (a password, a token, a secret, an access key, a key id) is
  `<hidden>`, and so is the password in a URL.
- An interpolation that asks a resolver for something of that name, for the environment (`${oc.env:HOME}`) or for a
  secret store stays as it is written, and so does its part of every value that refers to it.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .compose import plain_dict
from .hydra_job import job_config
from .resolve import unresolved

logger = logging.getLogger(__name__)

#: Stored in place of a secret.
HIDDEN = "<hidden>"

#: Words of a key that make its value a secret, and those that do as the last word, if the value is text: a
#: `token_size` or a number of tokens is none.
_SECRET_WORDS = frozenset(
    ("password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials", "apikey", "apikeys")
)
_SECRET_ENDS = frozenset(("token", "auth", "authorization", "bearer", "jwt"))
#: Tokens of a vocabulary.
_VOCABULARY = frozenset(
    ("audio", "bos", "class", "cls", "end", "eos", "image", "mask", "pad", "sep", "special", "start", "stop", "unk")
)
#: Words before `key`, and the word after it, that make a secret: a `primary_key` is none.
_KINDS_OF_KEY = frozenset(
    ("access", "account", "api", "auth", "encryption", "license", "private", "secret", "signing", "ssh", "storage")
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: A resolver's name, and what it is asked for.
_CALL = re.compile(r"\$\{\s*([\w.]+)\s*:([^{}$]*)")
#: A value that is nothing but an interpolation.
_INTERPOLATION = re.compile(r"\$\{[^$]*(\$\{[^{}]*\}[^$]*)*\}")
#: A resolver whose name is itself an interpolation.
_ANY_CALL = re.compile(r"\$\{[^{}:]*\$\{[^{}]*\}[\w.]*\s*:")
_SECRET_STORES = re.compile(r"env|secret|vault|password|token|credential|keyring|ssm", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^/\s:@${}]*:)([^/\s@${}]+)(?=@)")
#: Stands for the text of an interpolation while others are resolved; characters of private use.
_MARK = re.compile("\ue000(\\d+)\ue001")


def recorded_config(config: Any, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a manager and of the app around it, unresolved, and resolved where that may and can be.

    Args:
        config: what the manager was built from: a node of an app's config, a config of its own, or a dict.
        overrides: applied to it.

    Returns:
        Two nested dicts. In a Hydra job they hold the config of the whole job; else that of which `config` is a part,
        or `config` itself below the key `checkpoint`.
    """
    try:
        tree = _whole(config, unresolved(config, overrides))
    except Exception as error:  # whatever a user's resolvers raise: a record is no reason to stop a run
        logger.warning("the config could not be stored in the checkpoints: %s", error)
        return {}, {}
    return _changed(tree, _shown), resolved_config(tree)


def resolved_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace interpolations by their values, without secrets; what cannot be resolved stays as it is written."""
    texts: list[str] = []

    def guard(key: str, value: Any) -> Any:
        shown = _shown(key, value)
        if shown is value and isinstance(value, str) and "${" in value and _is_private(key, value):
            texts.append(value)
            return f"\ue000{len(texts) - 1}\ue001"
        return shown

    def restore(_: str, value: Any) -> Any:
        return _MARK.sub(lambda mark: texts[int(mark[1])], value) if isinstance(value, str) else value

    guarded = _changed(tree, guard)
    if "${" not in str(guarded):
        return dict(_changed(guarded, restore))
    values = _values(OmegaConf.create(guarded, flags={"allow_objects": True}), guarded)
    # A resolver may have made keys that were not there before.
    return dict(_changed(_changed(values, restore), _shown))


def _whole(config: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Put the checkpoint config into the app's config that it is a part of."""
    app: dict[str, Any] = {}
    key: str | None = None
    if isinstance(config, DictConfig) and config._get_parent() is not None:
        root = plain_dict(config._get_root(), resolve=False)
        key = config._get_full_key(None)
        app = root if isinstance(root, dict) else {}
    if not app.keys() - {"checkpoint"}:
        app, key = job_config() or app, "checkpoint"
    if key is None or key.isidentifier():
        return {**{name: item for name, item in app.items() if name != "hydra"}, key or "checkpoint": tree}
    whole = OmegaConf.create(
        {name: item for name, item in app.items() if name != "hydra"}, flags={"allow_objects": True}
    )
    OmegaConf.update(whole, key, tree, merge=False, force_add=True)
    return plain_dict(whole, resolve=False)


def _changed(tree: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """Change all values of nested dicts and lists; `change` is called with the dotted key and the value."""
    if isinstance(tree, dict):
        return {name: _changed(item, change, f"{key}.{name}") for name, item in tree.items()}
    if isinstance(tree, list):
        return [_changed(item, change, key) for item in tree]
    return change(key, tree)


def _shown(key: str, value: Any) -> Any:
    """The value of a key as it may be stored."""
    text = isinstance(value, str)
    if value in (None, "", "???", HIDDEN) or isinstance(value, bool) or (text and _INTERPOLATION.fullmatch(value)):
        return value
    if _is_credential(key, text=text):
        return HIDDEN
    return _URL_PASSWORD.sub(rf"\1{HIDDEN}", value) if text else value


def _is_private(key: str, text: str) -> bool:
    """Whether a text with interpolations must stay as it is written."""
    if _is_credential(key, text=True) or _ANY_CALL.search(text):
        return True
    return any(_SECRET_STORES.search(name) or _is_credential(asked, text=True) for name, asked in _CALL.findall(text))


def _is_credential(key: str, *, text: bool) -> bool:
    """Whether a dotted key, or one that it is below, looks like that of a credential."""
    return any(_names_credential([word.lower() for word in _WORD.findall(name)], text) for name in key.split("."))


def _names_credential(words: list[str], text: bool) -> bool:
    if _SECRET_WORDS.intersection(words):
        return True
    if text and words and words[-1] in _SECRET_ENDS and not _VOCABULARY.intersection(words):
        return True
    pairs = set(itertools.pairwise(words))
    return ("key", "id") in pairs or any((kind, "key") in pairs for kind in _KINDS_OF_KEY)


def _values(node: Any, written: Any) -> Any:
    """A node as plain values; `written` is its form with interpolations, which stays where one cannot be resolved."""
    if isinstance(node, DictConfig):
        return {key: _value(node, key, _at(written, key)) for key in node}
    if isinstance(node, ListConfig):
        return [_value(node, number, _at(written, number)) for number in range(len(node))]
    return node


def _value(node: DictConfig | ListConfig, key: Any, written: Any) -> Any:
    try:
        return _values(node[key], written)
    except (OmegaConfBaseException, RecursionError):
        return written


def _at(written: Any, key: Any) -> Any:
    """The written form below a node; that of the node itself if it is an interpolation of a whole dict or list."""
    return written[key] if isinstance(written, (dict, list)) else written
