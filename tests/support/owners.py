"""Owner files that name another process, as a run of that process would have written them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_component.core.commit.fencing import Owner
from ckpt_component.core.commit.names import OWNER
from ckpt_component.core.processes.running import ProcessName


def owned_by(root: Path, pid: int, **changes: Any) -> Owner:
    """Let the owner file of a root name a process of this host; `changes` are other values for it."""
    this, started = ProcessName.current(), 1
    with suppress(FileNotFoundError):  # it has ended, as every process that started with the boot
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    owner = replace(Owner(1, "0" * 16, this.host, pid, time.time(), this.space, started), **changes)
    root.mkdir(parents=True, exist_ok=True)
    (root / OWNER).write_text(json.dumps(owner.to_plain()))
    return owner
