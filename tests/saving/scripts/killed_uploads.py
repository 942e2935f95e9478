"""Kill an upload at each of its operations, and let the next process go on; torch-free, so that it may fork.

Arguments: the local folder, a folder for the targets, how the targets commit (1: by rename). Prints how many operations
an upload has, and in how many cases files of the killed upload were used by the next.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ckpt_component.background.jobs import RunWatch
from ckpt_component.background.upload_policy import UploadPolicy
from ckpt_component.background.uploading import Uploader
from ckpt_component.core.commit.cleanup import RetentionPolicy
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.core.storage.new_names import NEW_PREFIX
from ckpt_component.formats.verification import verify_checkpoint

source, folder, by_rename = sys.argv[1], sys.argv[2], sys.argv[3] == "1"


def upload(target: str, log: str, failpoint: str) -> int:
    """Upload in a child; returns its status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    os.environ.update({FAILPOINT_LOG: log, FAILPOINT: failpoint})
    policy = UploadPolicy(source, target, MEGATRON, RetentionPolicy(last=1), run=log, atomic_rename=by_rename)
    run, failed = RunWatch(policy), list[dict[str, Any]]()
    run.ended.set()
    Uploader(policy, run, lambda message: failed.append(message) if "failed" in message else None).run()
    os._exit(1 if failed else 0)


def count(log: str, operation: str) -> int:
    return sum(each.operation == operation for each in read_log(log))


def check(target: str, *, complete: bool) -> None:
    """What is visible is whole."""
    storage = file_storage(atomic_rename=by_rename)
    scan = scan_steps(storage, target, MEGATRON)
    assert not (scan.damaged or scan.torn or scan.unusable), scan
    assert scan.committed in ([[2]] if complete else [[], [1], [2], [1, 2]]), (target, scan)
    for step in scan.committed:
        verify_checkpoint(storage, os.path.join(target, MEGATRON.folder(step)))
    if complete:
        # A draft of the pointer goes when a run takes the folder; here there was nothing left to upload.
        allowed = (".ckpt-owner.json", f"{NEW_PREFIX}{MEGATRON.pointer}.")
        left = [name for name in os.listdir(target) if name.startswith(".ckpt-") and not name.startswith(allowed)]
        assert not left, left


os.makedirs(folder)
assert upload(f"{folder}/whole", f"{folder}/log", "") == 0
check(f"{folder}/whole", complete=True)
operations, files, continued = len(read_log(f"{folder}/log")), count(f"{folder}/log", "create"), 0
for number in range(1, operations + 1):
    target, log = f"{folder}/{number}", f"{folder}/log{number}"
    status = upload(target, log, f"any:nth={number}:action=kill")
    assert os.WIFSIGNALED(status), (number, status)
    check(target, complete=False)
    assert upload(target, f"{log}.next", "") == 0, number
    check(target, complete=True)
    continued += count(f"{log}.next", "create") < files and count(f"{log}.next", "create") > 0
print(operations, continued)
