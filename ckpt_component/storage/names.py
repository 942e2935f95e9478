"""What things are called on disk.

The names of committed checkpoints and of the pointer file are Megatron's (or the plain `step` form); the names
of unfinished and of retired folders start with a dot and our own prefix, so that nothing else is ever deleted.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from dataclasses import dataclass

MANIFEST = "manifest.json"
OWNER = ".ckpt-owner.json"
#: How files end that a reader takes for a checkpoint, alone in a folder.
SINGLE_FILES = (".pt", ".pth", ".bin", ".safetensors")
STAGING_PREFIX = ".ckpt-tmp."
TRASH_PREFIX = ".ckpt-trash."
TRIAL_PREFIX = ".ckpt-trial."
ALIVE_PREFIX = ".ckpt-alive."
QUARANTINE_PREFIX = ".ckpt-quarantine."
#: In the folder of an attempt, or of a checkpoint, that stays where it is and is used no more: what its manifest was.
QUARANTINED = "quarantined.json"

#: The most digits that a step has; more than any training run takes.
STEP_DIGITS = 18
MAX_STEP = 10**STEP_DIGITS - 1

_OWNED = "-o"
_TOKEN = re.compile(rf"[0-9a-f]{{8}}-[0-9a-f]{{8}}({_OWNED})?(-\d+)?")


def integrity_name(rank: int) -> str:
    """The file in which a rank writes down what it wrote: every item with its place and CRC."""
    return f"integrity-{rank}.json"


@dataclass(frozen=True)
class StepNames:
    """How steps become folder names, and the pointer file beside them."""

    prefix: str
    digits: int
    pointer: str

    def folder(self, step: int) -> str:
        """`iter_0000200` for step 200."""
        return f"{self.prefix}{step:0{self.digits}d}"

    def step(self, name: str) -> int | None:
        """The step of a folder name, or None for any other name."""
        if re.fullmatch(rf"{re.escape(self.prefix)}\d{{{self.digits},}}", name) is None:
            return None
        return int(name[len(self.prefix) :])


#: As Megatron-LM names them.
MEGATRON = StepNames("iter_", 7, "latest_checkpointed_iteration.txt")
STEP = StepNames("step_", 8, "latest")
#: By the words of `checkpoint.naming`.
NAMINGS = {"megatron": MEGATRON, "step": STEP}

#: As programs name a checkpoint by its step: iter_0000200, step-200, global_step200, checkpoint-200, epoch=1-step=200.
_NAMED_STEP = re.compile(rf"(?:.*[^a-z])?(?:iter|iteration|step|checkpoint|ckpt)[_=-]?(\d{{1,{STEP_DIGITS}}})", re.I)


def step_in_name(name: str) -> int | None:
    """The step that a folder or a file of any program's names, or None."""
    match = _NAMED_STEP.fullmatch(os.path.splitext(name)[0])
    return None if match is None else int(match[1])


def new_token() -> str:
    """The identity of one save attempt: this host, and a random part."""
    return f"{_host_token()}-{os.urandom(4).hex()}"


def owned_token(token: str) -> str:
    """The token of an attempt that is committed only while its run owns the root."""
    return token + _OWNED


def is_owned_token(token: str) -> bool:
    """Whether this is a token of `owned_token`, or of one of its tries."""
    match = _TOKEN.fullmatch(token)
    return match is not None and match[1] is not None


def token_of_try(token: str, number: int) -> str:
    """The token of a save's n-th try, from 1; all ranks derive the same one from what they agreed on at first."""
    return token if number == 1 else f"{token}-{number}"


def is_token(name: object) -> bool:
    """Whether this is the token of some attempt, which is its folder's name inside that of the checkpoint."""
    return isinstance(name, str) and _TOKEN.fullmatch(name) is not None


def is_token_of_this_host(token: str) -> bool:
    """Whether a process of this host made this token."""
    return is_token(token) and token.startswith(f"{_host_token()}-")


@dataclass(frozen=True)
class Attempt:
    """One try to make the checkpoint `target`.

    Attributes:
        target: absolute path of the checkpoint to be.
        token: identifies this attempt.
        owner: the run that must own the folder of the target at the commit; empty: anyone may commit there.
        by_rename: whether the commit renames the staging folder, or creates the manifest in the target.
    """

    target: str
    token: str
    owner: str = ""
    by_rename: bool = True

    @functools.cached_property
    def staging(self) -> str:
        """The folder that collects the files: beside the target until the commit, or in it for good."""
        if not self.by_rename:
            return os.path.join(self.target, self.token)
        folder, name = os.path.split(self.target)
        return os.path.join(folder, f"{STAGING_PREFIX}{name}.{self.token}")


def token_of(name: str) -> str:
    """The token at the end of the name of a folder or a small file of ours, after a dot or a slash."""
    return re.split("[./]", name)[-1]


def trash_path(path: str) -> str:
    """A new name beside `path` under which it waits for deletion."""
    name = os.path.basename(path).removeprefix(STAGING_PREFIX)
    return os.path.join(os.path.dirname(path), f"{TRASH_PREFIX}{name}.{new_token()}")


def quarantine_path(path: str) -> str:
    """A new name beside `path` under which a damaged checkpoint is kept for inspection."""
    return os.path.join(os.path.dirname(path), f"{QUARANTINE_PREFIX}{os.path.basename(path)}.{new_token()}")


def _host_token() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
