"""Which parts of a config are secrets, and what is stored in their place.

- The value of a key that looks like a credential (a password, a token, a secret, a cookie, an access key, a key id) is
  `<hidden>`. So is the password of a URL, a parameter of it with such a name, what follows `Bearer`, and the value of
  an environment variable with such a name wherever it is.
- So is every option of a bucket, below `storage.options`.
- An interpolation stays as it is written if it asks the environment (`${oc.env:HOME}`), a resolver named like a secret
  store, or any resolver for something named like a credential.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

#: Stored in place of a secret.
HIDDEN = "<hidden>"

#: Words of a key that make its value a secret, and those that do as the last word, if the value is text: a
#: `token_size` or a number of tokens is none.
_WORDS = frozenset(
    ("password", "passwd", "passphrase", "pwd", "secret", "credential", "cred", "apikey", "pgpass", "dbpass", "keyid")
)
_LAST_WORDS = frozenset(("token", "auth", "authorization", "bearer", "jwt", "cookie", "cookies", "pass", "pat", "sas"))
#: Words after which the last word names no secret: tokens of a vocabulary, passes of training.
_VOCABULARY = frozenset(
    ("audio", "bos", "class", "cls", "end", "eos", "image", "mask", "pad", "sep", "special", "start", "stop", "unk")
)
_PASSES = frozenset(("forward", "backward", "first", "second", "single", "multi", "by"))
#: Words before `key` that make a secret: a `primary_key` is none. A `key_id` is one too.
_KINDS_OF_KEY = frozenset(
    ("access", "account", "api", "auth", "encryption", "license", "private", "secret", "signing", "ssh", "storage")
)
_PAIRS = frozenset((("key", "id"), ("pass", "phrase"), *((kind, "key") for kind in _KINDS_OF_KEY)))
#: Ends of words that are written as one: `clientsecret`, `authtoken`, `privatekeys`.
_JOINED = re.compile(
    r"(password|passwd|passphrase|secret|credential|apikey|(access|auth|bearer|refresh|session|hf|github|gitlab)token"
    rf"|({'|'.join(sorted(_KINDS_OF_KEY))})key)s?$"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: Values shorter than this are in too many texts to be taken for that of an environment variable.
_SHORTEST_VALUE = 8

#: A resolver's name and what it is asked for; and a resolver whose name is itself an interpolation.
_CALL = re.compile(r"\$\{\s*([\w.]+)\s*:([^{}$]*)")
_ANY_CALL = re.compile(r"\$\{[^{}:]*\$\{[^{}]*\}[\w.]*\s*:")
_SECRET_STORES = re.compile(r"env|secret|vault|password|token|credential|keyring|ssm", re.IGNORECASE)
#: A value that is nothing but an interpolation.
_INTERPOLATION = re.compile(r"\$\{[^$]*(\$\{[^{}]*\}[^$]*)*\}")
_BEARER = re.compile(r"(\bbearer\s+)(?=\S*\d)[\w.~+/=-]{8,}", re.IGNORECASE)
#: A parameter of a URL, and those that sign one.
_PARAMETER = re.compile(r"([?&;]([\w.-]+)=)[^&;#\s${}]+")
_SIGNATURES = frozenset(("sig", "signature"))
_URL_PASSWORD = re.compile(r"(://[^/\s:@${}]*:)([^/\s@${}]+)(?=@)")


def shown(key: str, value: Any) -> Any:
    """The value of a dotted key as it may be stored."""
    text = isinstance(value, str)
    if value in (None, "", "???", HIDDEN) or isinstance(value, bool) or (text and _INTERPOLATION.fullmatch(value)):
        return value
    if _is_credential(key, text=text) or ".storage.options." in f".{key}":
        return HIDDEN
    return _without_secrets(value) if text else value


def _without_secrets(text: str) -> str:
    """A text without the secrets that it shows by their form."""

    def parameter(found: re.Match[str]) -> str:
        signs = found[2].lower().rpartition("-")[2] in _SIGNATURES
        return f"{found[1]}{HIDDEN}" if signs or _is_credential(found[2], text=True) else found[0]

    if "://" in text:
        text = _PARAMETER.sub(parameter, _URL_PASSWORD.sub(rf"\1{HIDDEN}", text))
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def is_private(key: str, text: str) -> bool:
    """Whether the value of a dotted key, a text with interpolations, must stay as it is written."""
    if _is_credential(key, text=True) or _ANY_CALL.search(text):
        return True
    return any(_SECRET_STORES.search(name) or _is_credential(asked, text=True) for name, asked in _CALL.findall(text))


def environment_secrets() -> re.Pattern[str] | None:
    """A pattern of the values of environment variables that look like credentials; None: there are none."""
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_VALUE and not os.path.exists(value) and _is_credential(name, text=True)
    }
    return re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True)))) if values else None


def _is_credential(key: str, *, text: bool) -> bool:
    """Whether a dotted key, or one that it is below, looks like that of a credential."""
    names = [[word.lower() for word in _WORD.findall(name)] for name in key.split(".")]
    # `private.key` is named as `private_key` is.
    nested = [[*above[-1:], *name] for above, name in itertools.pairwise(names) if name in (["key"], ["keys"])]
    return any(_names_credential(words, text) for words in names + nested)


def _names_credential(words: list[str], text: bool) -> bool:
    if any({word, word.removesuffix("s")} & _WORDS or _JOINED.search(word) for word in words):
        return True
    if text and words and words[-1] in _LAST_WORDS and not (_VOCABULARY | _PASSES).intersection(words):
        return True
    pairs = {(one, other.removesuffix("s")) for one, other in itertools.pairwise(words)}
    return not pairs.isdisjoint(_PAIRS)
