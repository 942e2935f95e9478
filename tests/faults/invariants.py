"""What must hold after every fault: I1 to I3 and I5 on a root of checkpoints of known states.

I1: every acknowledged step loads bit-exact, or a newer one took its place. I2: so does the one that a run resumes
from. I3: nothing uncommitted stands under a checkpoint's name. I5: the next save works, and nothing is left behind.
I4 (no process, memory, descriptor or thread is left) is the tests' side: `Forker.drain`, and `conftest.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from inside import checkpointer_of

from ckpt_component import CheckpointError, build_manager
from ckpt_component.core.commit.names import (
    ALIVE_PREFIX,
    MEGATRON,
    OWNER,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
    is_token,
)
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import NEW_PREFIX

#: What is always in a root beside its checkpoints.
FIXED = {MEGATRON.pointer, OWNER, "events"}
#: Commits without a rename.
MANIFEST_MODE = "checkpoint.commit=manifest"


def state_of(step: int) -> dict[str, Any]:
    """A state that says in every byte which step it is of; what a mixed checkpoint would show."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {f"layer{n}": torch.randn(40 + n, 33, generator=generator) for n in range(3)},
        "counts": torch.full((7,), step, dtype=torch.int64),
        "half": torch.full((5, 5), step, dtype=torch.bfloat16),
        "step": step,
        "note": f"step {step}",
    }


def blank_state() -> dict[str, Any]:
    """The target of a restore: the same structure, other bytes."""
    return state_of(0)


def differences(found: Any, expected: Any, key: str = "") -> list[str]:
    """The keys at which two states are not the same to the bit."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{key} has other keys"]
        return [text for name in expected for text in differences(found[name], expected[name], f"{key}/{name}")]
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
        return [] if same else [f"{key} has other bytes"]
    return [] if found == expected else [f"{key} is {found!r} and not {expected!r}"]


def age(root: str) -> None:
    """Make what is in a root look some minutes old, as it is when a job comes back: very young folders are not swept.

    Where there are no locks, what changed a moment ago is not either.
    """
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            os.utime(os.path.join(folder, name), (1, 1))


def is_unfinished(folder: str) -> bool:
    """Whether there are attempts alone below a checkpoint's name, which then have it to win (`commit=manifest`)."""
    return all(map(is_token, os.listdir(folder)))


def violations_at(
    root: str, acknowledged: int, keep: int = 1, preset: str = "sync", overrides: Sequence[str] = ()
) -> tuple[list[str], int]:
    """Check I1 to I3, resume, and I5.

    Args:
        root: the folder of the checkpoints; each is of `state_of(its step)`.
        acknowledged: the newest step that a save was reported for; 0: none yet.
        keep: the `keep.last` of the run.
        preset: with which the next save is made.
        overrides: of the run; `checkpoint.commit` among them has its own form of what is not finished.

    Returns:
        What is wrong in words, and the newest committed step now (that of the next save).
    """
    wrong: list[str] = []
    Path(root).mkdir(parents=True, exist_ok=True)
    listed = scan_steps(FileStorage(), root, MEGATRON).committed
    for name in os.listdir(root):
        step = MEGATRON.step(name)
        if step is not None and step not in listed:
            if MANIFEST_MODE in overrides and is_unfinished(os.path.join(root, name)):
                continue
            wrong.append(f"I3: {name} is there and not committed: {os.listdir(os.path.join(root, name))}")
        elif (
            step is None
            and not name.startswith((STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX, NEW_PREFIX))
            and name not in FIXED
        ):
            wrong.append(f"I3: {name} is nothing of ours")
    newest = max(listed, default=0)
    if newest < acknowledged:
        wrong.append(f"I1: step {acknowledged} was acknowledged, and there is only {listed}")
    age(root)
    usual = [f"checkpoint.keep.last={keep}", "checkpoint.save.at_end=false", "checkpoint.timeouts.close=20"]
    try:
        with build_manager(preset, [*usual, *overrides], dir=root) as manager:
            for step in listed:
                loaded = checkpointer_of(manager).load(manager.path_of(step))
                wrong += [f"I1: step {step}: {text}" for text in differences(loaded, state_of(step))]
            target = blank_state()
            resumed = manager.restore(target) or 0
            wrong += [f"I2: resumed from {resumed}, and the newest is {newest}"] * (resumed != newest)
            wrong += [f"I2: step {resumed}: {text}" for text in differences(target, state_of(resumed))]
            newest += 1
            manager.save(newest, state_of(newest))
            manager.wait()
    except CheckpointError as error:
        return [*wrong, f"I2/I5: {type(error).__name__}: {error}"], newest
    kept = scan_steps(FileStorage(), root, MEGATRON).committed
    if newest not in kept or len(kept) > keep:
        wrong.append(f"I5: after the save of {newest} there is {kept}")
    expected = {MEGATRON.folder(step) for step in kept} | FIXED
    if set(os.listdir(root)) != expected:
        wrong.append(f"I5: left behind: {sorted(set(os.listdir(root)) ^ expected)}")
    if (Path(root) / MEGATRON.pointer).read_text() != str(newest):
        wrong.append(f"I5: the pointer says {(Path(root) / MEGATRON.pointer).read_text()!r}")
    return wrong, newest
