"""Names of files and folders on disk.

Committed checkpoints and the pointer file have the names of `checkpoint.naming`, by default Megatron's. Unfinished and
retired folders have names that start with `.ckpt-`, so that cleanup never deletes anything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..outside import OUTSIDE, Outside
from ..storage.new_names import host_token, new_token

MANIFEST = "manifest.json"
#: What a checkpoint says about the run that saved it; see `run_record`.
RUN_RECORD = "run.json"
OWNER = ".ckpt-owner.json"
#: Suffixes of a file that readers accept as a checkpoint when it is the only file in a folder.
SINGLE_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
#: The end of names that other programs' files have as well.
_ANY_BINARY = ".bin"
#: The record of a `torch.save` archive whose directory has the CRC-32 of every record.
CHECKSUMS = ".checksums"
STAGING_PREFIX = ".ckpt-tmp."
TRASH_PREFIX = ".ckpt-trash."
TRIAL_PREFIX = ".ckpt-trial."
ALIVE_PREFIX = ".ckpt-alive."
QUARANTINE_PREFIX = ".ckpt-quarantine."
#: Marks a quarantined folder that stays in place; contains the former manifest.
QUARANTINED = "quarantined.json"

#: Maximum number of digits of a step.
STEP_DIGITS = 18
MAX_STEP = 10**STEP_DIGITS - 1

_OWNED = "-o"
_TOKEN = re.compile(rf"[0-9a-f]{{8}}-[0-9a-f]{{8}}({_OWNED})?(-\d+)?")


def integrity_name(rank: int) -> str:
    """The file in which a rank lists every item that it wrote, with location and CRC."""
    return f"integrity-{rank}.json"


@dataclass(frozen=True)
class StepNames:
    """How steps map to folder names, and the name of the pointer file."""

    prefix: str
    digits: int
    pointer: str

    def folder(self, step: int) -> str:
        """`iter_0000200` for step 200."""
        return f"{self.prefix}{step:0{self.digits}d}"

    def step(self, name: str) -> int | None:
        """The step of a folder name, or None for any other name."""
        digits = name.removeprefix(self.prefix)
        is_number = digits != name and digits.isascii() and digits.isdigit()
        return int(digits) if is_number and len(digits) >= self.digits else None

    def step_of(self, name: str) -> int | None:
        """The step whose folder has exactly this name, or None."""
        step = self.step(name)
        return None if step is None or self.folder(step) != name else step


#: The names of Megatron-LM.
MEGATRON = StepNames("iter_", 7, "latest_checkpointed_iteration.txt")
STEP = StepNames("step_", 8, "latest")
#: The names of the `Trainer` of transformers, which finds the newest by listing the folder.
HUGGINGFACE = StepNames("checkpoint-", 1, "latest_checkpoint.txt")
#: The names of torchtitan, which finds the newest by listing the folder.
TORCHTITAN = StepNames("step-", 1, "latest_step.txt")
#: Values of `checkpoint.naming`.
NAMINGS = {"megatron": MEGATRON, "step": STEP, "huggingface": HUGGINGFACE, "torchtitan": TORCHTITAN}

#: Step names of common programs: iter_0000200, step-200, global_step200, checkpoint-200, epoch=1-step=200.
_NAMED_STEP = re.compile(rf"(?:.*[^a-z])?(?:iter|iteration|step|checkpoint|ckpt)[_=-]?(\d{{1,{STEP_DIGITS}}})", re.I)


def no_step(path: str) -> str:
    """What to add to a text about a path that does not exist, if it names a step with `@`."""
    return " (@ is for ckpt and load_weights)" if "@" in os.path.basename(path) else ""


def step_in_name(name: str) -> int | None:
    """The step in the name of any program's folder or file, or None."""
    match = _NAMED_STEP.fullmatch(os.path.splitext(name)[0])
    return None if match is None else int(match[1])


def owned_token(token: str) -> str:
    """The token of an attempt that may be committed only while its run owns the root."""
    return token + _OWNED


def is_owned_token(token: str) -> bool:
    """Whether this token comes from `owned_token`, or from a retry of such an attempt."""
    match = _TOKEN.fullmatch(token)
    return match is not None and match[1] is not None


def token_of_try(token: str, number: int) -> str:
    """The token of a save's n-th try, from 1. All ranks derive the same one from the token of the first try."""
    return token if number == 1 else f"{token}-{number}"


def is_token(name: object) -> bool:
    """Whether this is the token of an attempt. A folder inside a checkpoint with such a name holds an attempt."""
    return isinstance(name, str) and _TOKEN.fullmatch(name) is not None


def is_token_of_this_host(token: str, outside: Outside = OUTSIDE) -> bool:
    """Whether a process of this host made this token."""
    return is_token(token) and token.startswith(f"{host_token(outside)}-")


def token_of(name: str) -> str:
    """The token at the end of a name in this module's format, after a dot or a slash."""
    return re.split("[./]", name)[-1]


def staging_path(path: str, token: str) -> str:
    """The path next to `path` where an attempt collects its files."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{STAGING_PREFIX}{name}.{token}")


def trash_path(path: str, outside: Outside = OUTSIDE) -> str:
    """A new path next to `path`, for a folder that is about to be deleted."""
    name = os.path.basename(path).removeprefix(STAGING_PREFIX)
    return os.path.join(os.path.dirname(path), f"{TRASH_PREFIX}{name}.{new_token(outside)}")


def quarantine_path(path: str, outside: Outside = OUTSIDE) -> str:
    """A new path next to `path`, where a damaged checkpoint is kept for inspection."""
    name = f"{QUARANTINE_PREFIX}{os.path.basename(path)}.{new_token(outside)}"
    return os.path.join(os.path.dirname(path), name)


def saved_as(name: str) -> str:
    """The name under which a checkpoint was saved, or was to be, that has a hidden name now."""
    for prefix in (STAGING_PREFIX, TRASH_PREFIX, QUARANTINE_PREFIX):
        name = name.removeprefix(prefix)
    return name.partition("/")[0].partition(".")[0]


def is_stray(name: str, names: Sequence[str]) -> bool:
    """Whether a file that ends as weights do is probably something else: a `.bin` whose folder has nothing of a model.

    Args:
        name: of the file
        names: of all files in its folder
    """
    return name.endswith(_ANY_BINARY) and "model" not in name and "config.json" not in names
