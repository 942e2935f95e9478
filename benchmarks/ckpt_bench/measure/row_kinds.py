"""The rows by name, with their family and requirements. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The hardware's own speed, measured as a row among the others.
LIMITS = "limits"


@dataclass(frozen=True)
class RowKind:
    """One way of saving.

    Attributes:
        family: `ours`, `torch`, or `peers`, which run in an environment of their own
        needs: the module that a peer is; None: torch has it
        fsyncs: whether it syncs its files itself. For the others the benchmark does, on the clock of `durable`.
        preset: of ours, what `build_checkpointer` gets
        overrides: of ours, what is changed in the preset
        fast: of ours, whether packages that compute checksums faster are used; others are as a plain install has them
    """

    family: str
    needs: str | None = None
    fsyncs: bool = False
    preset: str = ""
    overrides: tuple[str, ...] = ()
    fast: bool = False


def _ours(preset: str, *overrides: str) -> RowKind:
    return RowKind("ours", fsyncs=True, preset=preset, overrides=overrides)


def _fast(preset: str) -> RowKind:
    return RowKind("ours", fsyncs=True, preset=preset, overrides=("checkpoint.writer.checksum=auto",), fast=True)


_NVRX = "nvidia_resiliency_ext"

ROWS: Mapping[str, RowKind] = {
    "sync": _ours("sync"),
    "async_persistent": _ours("async_persistent"),
    "async_persistent_fast": _fast("async_persistent"),
    "async_pinned": _ours("async_persistent", "checkpoint/stager=pinned"),
    "async_temporal": _ours("async_temporal"),
    "async_zero_overhead": _ours("async_zero_overhead"),
    "async_zero_overhead_fast": _fast("async_zero_overhead"),
    "torch_save": RowKind("torch"),
    "dcp_save_t1": RowKind("torch", fsyncs=True),
    "dcp_save_t2": RowKind("torch", fsyncs=True),
    "dcp_async_thread": RowKind("torch", fsyncs=True),
    "dcp_async_process": RowKind("torch", fsyncs=True),
    "dcp_experimental": RowKind("torch"),
    "safetensors": RowKind("peers", "safetensors"),
    "torch_checkpointing": RowKind("peers", "torch_checkpointing"),
    "nvrx_persistent": RowKind("peers", _NVRX, fsyncs=True),
    "nvrx_persistent_clone": RowKind("peers", _NVRX, fsyncs=True),
    "nvrx_temporal": RowKind("peers", _NVRX, fsyncs=True),
    "nvrx_torch_persistent_clone": RowKind("peers", _NVRX),
    "nvrx_torch_temporal": RowKind("peers", _NVRX),
    "torchsnapshot_take": RowKind("peers", "torchsnapshot"),
    "torchsnapshot_async_take": RowKind("peers", "torchsnapshot"),
}

FAMILIES = ("ours", "torch", "peers")


def rows_of(*families: str) -> list[str]:
    """The names of the rows of some families, in the table's order."""
    return [name for name, row in ROWS.items() if row.family in families]
