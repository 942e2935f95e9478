"""Lives of one checkpoint on a simulated disk, without a manager: a save, a deletion, a quarantine, and their faults."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import discard, quarantine
from ckpt_component.core.commit.manifest import check_files, data_folder, read_manifest
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.errors import CheckpointError
from ckpt_component.testing import Disk, Fault, PowerCut, SimulatedFiles

ROOT, TARGET = "/runs", "/runs/iter_0000001"
FILES = {"data": b"1234567890", "more": b"abc"}
FAULTS = {
    "cut": Fault("cut"),
    "fails": Fault("fail"),
    "fails_from_then_on": Fault("fail", lasts=True),
    "is_full": Fault("fail", errno.ENOSPC),
    "answer_lost": Fault("lost"),
}
SEEDS = range(6)


@dataclass
class Trial:
    """One life on a simulated disk.

    Attributes:
        files: its storage
        acknowledged: whether what was done was reported as done
        error: why it was not
    """

    files: SimulatedFiles
    acknowledged: bool = False
    error: BaseException | None = None
    tokens: list[str] = field(default_factory=list)


def save(trial: Trial) -> None:
    files, attempt = trial.files, commit.new_attempt(trial.files, TARGET, new_token())
    trial.tokens.append(attempt.token)
    try:
        commit.begin(attempt)
        for name, data in FILES.items():
            files.write_new(os.path.join(attempt.staging, name), data)
        entries = [{"name": name, "size": len(data)} for name, data in FILES.items()]
        commit.publish(attempt, [{"rank": 0, "files": entries}], {".metadata": b"m"}, {"format": "x"})
        trial.acknowledged = True
    except (CheckpointError, OSError) as error:
        trial.error = error
        commit.abandon(attempt)


def delete(trial: Trial) -> None:
    trial.acknowledged = discard(trial.files, TARGET)


def set_aside(trial: Trial) -> None:
    try:
        quarantine(trial.files, TARGET)
        trial.acknowledged = True
    except (CheckpointError, OSError) as error:
        trial.error = error


def seen(files: SimulatedFiles) -> bool:
    """Whether a reader finds a checkpoint, which must be whole."""
    manifest = read_manifest(files, TARGET)
    if manifest is None:
        return False
    folder = data_folder(files, TARGET, manifest)
    check_files(files, folder, manifest)
    for name, data in FILES.items():
        assert files.read(os.path.join(folder, name), 100) == data
    assert files.read(os.path.join(folder, ".metadata"), 100) == b"m"
    return True


def lives(act: Callable[[Trial], None], protocol: str, before: Callable[[Trial], None] | None, fault: str):  # type: ignore[no-untyped-def]
    """Each life with the fault at one operation, and the states of the disk that it may leave."""
    rename = protocol == "rename"

    def on(disk: Disk, faults: dict[int, Fault]) -> Trial:
        return Trial(SimulatedFiles(disk, faults, atomic_rename=rename, locks=rename))

    first = on(Disk(), {})
    first.files.make_folders(ROOT)
    if before is not None:
        before(first)
        assert first.acknowledged
    usual = on(copy.deepcopy(first.files.disk), {})
    act(usual)
    for number, operation in enumerate([*usual.files.operations, ("end", "")], 1):
        trial = on(copy.deepcopy(first.files.disk), {number: FAULTS[fault]})
        try:
            act(trial)
        except PowerCut:
            assert fault == "cut"
        for seed in SEEDS if fault == "cut" else [None]:
            disk = copy.deepcopy(trial.files.disk)
            if seed is not None:
                disk.cut_power(seed)
            yield f"{operation}, seed {seed}: {trial.error}", trial, on(disk, {}).files
