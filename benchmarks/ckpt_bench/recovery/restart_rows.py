"""The rows of `ckpt-bench recovery`: where a killed job resumes from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class RestartRow(NamedTuple):
    """One way back.

    Attributes:
        resume: the class of `recovery` that saves and restores, as `module:class`
        is_whole: False: it saves one number instead of the state
        overrides: what is changed in the preset `async_persistent`
        on_meta: build the model on the meta device, and initialise it only if there is nothing to restore
    """

    resume: str
    is_whole: bool = True
    overrides: tuple[str, ...] = ()
    on_meta: bool = False


_MANAGED = "managed_resume:ManagedResume"
_IN_MEMORY = ("checkpoint/recovery=host", "checkpoint.recovery.every_steps=1", "checkpoint.recovery.lease=120")

RESTART_ROWS: Mapping[str, RestartRow] = {
    "memory": RestartRow(_MANAGED, overrides=_IN_MEMORY),
    "meta": RestartRow(_MANAGED, overrides=_IN_MEMORY, on_meta=True),
    "disk": RestartRow(_MANAGED),
    "dcp_load": RestartRow("stock_resume:StockResume"),
    "empty": RestartRow(_MANAGED, is_whole=False),
}
#: What the others are compared with.
EMPTY = "empty"
MEMORY = "memory"
#: From memory, too, into a model on the meta device.
META = "meta"
