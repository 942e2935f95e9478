"""Kill the process of one of two hosts at each of its operations, and let the next go on; torch-free, so that it may fork.

Arguments: the folder of the local folders, a folder for the targets, how the targets commit (1: by rename), the host
whose process is killed, and the first operation and the stride. Prints how many operations it has.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ckpt_component.background.jobs import RunWatch
from ckpt_component.background.upload_policy import UploadPolicy
from ckpt_component.core.commit.cleanup import RetentionPolicy
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.core.storage.new_names import NEW_PREFIX
from ckpt_component.formats.verification import verify_checkpoint
from ckpt_component.hosts.host_uploads import LeadingUploader, PartUploader

HOSTS = ("host-a", "host-b")
sources, folder, by_rename, victim = sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4]
first, stride = map(int, sys.argv[5:])


def upload(host: str, target: str, log: str = "", failpoint: str = "") -> int:
    """Upload what a host has in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    if log:
        os.environ.update({FAILPOINT_LOG: log, FAILPOINT: failpoint})
    policy = UploadPolicy(
        os.path.join(sources, host),
        target,
        MEGATRON,
        RetentionPolicy(last=1),
        run=os.path.basename(target),
        atomic_rename=by_rename,
        hosts=HOSTS,
        host=host,
    )
    run, failed = RunWatch(policy), list[dict[str, Any]]()
    run.ended.set()
    kind = LeadingUploader if policy.leads else PartUploader
    kind(policy, run, lambda message: failed.append(message) if "failed" in message else None).run()
    os._exit(0)


def check(target: str, *, complete: bool) -> None:
    """What is visible is whole."""
    storage = file_storage(atomic_rename=by_rename)
    scan = scan_steps(storage, target, MEGATRON)
    assert not (scan.damaged or scan.torn or scan.unusable), scan
    assert scan.committed in ([[2]] if complete else [[], [2]]), (target, scan)
    for step in scan.committed:
        verify_checkpoint(storage, os.path.join(target, MEGATRON.folder(step)))
    if complete:
        allowed = (".ckpt-owner.json", f"{NEW_PREFIX}{MEGATRON.pointer}.")
        left = [name for name in os.listdir(target) if name.startswith(".ckpt-") and not name.startswith(allowed)]
        data = os.path.join(target, MEGATRON.folder(2), scan.manifests[2].get("at", ""))
        left += [name for name in os.listdir(data) if name.startswith(".ckpt-")]
        assert not left, left


os.makedirs(folder)
other = next(host for host in HOSTS if host != victim)
whole = os.path.join(folder, "whole")
children = [upload(other, whole), upload(victim, whole, f"{folder}/log")]
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
check(whole, complete=True)
operations = len(read_log(f"{folder}/log"))
for number in range(first, operations + 1, stride):
    target = os.path.join(folder, str(number))
    beside, child = upload(other, target), upload(victim, target, f"{target}.log", f"any:nth={number}:action=kill")
    status = os.waitpid(child, 0)[1]
    # The other may have written first what both try to write.
    assert os.WIFSIGNALED(status) or number > operations - 3, (number, status)
    check(target, complete=False)
    assert [os.waitpid(each, 0)[1] for each in (upload(victim, target), beside)] == [0, 0], number
    check(target, complete=True)
print(operations)
