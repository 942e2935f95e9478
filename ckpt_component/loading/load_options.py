"""What a load does with a checkpoint and its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..formats.source import Source
from .collective import CollectiveLoad


@dataclass(frozen=True)
class LoadOptions:
    """What a load does with a checkpoint and its target.

    Attributes:
        map_location: a device, dict or function as for `torch.load`, for tensors that have no target
        strict: refuse a checkpoint that lacks keys of the target
        allow_dtype_cast: convert values to the dtype of the target tensor
        allow_unexpected: ignore keys of the checkpoint that the target lacks; False: refuse them
        resuming: a run resumes from this checkpoint; it is verified with `verify: on_resume`
        rename: as for `KeyMap`
        prefix: as for `KeyMap`
        ignore: as for `KeyMap`
        modules: those whose tensors are in a target that is a dict of a module's state
        narrow: returns the part of the checkpoint that the target is compared with, under its new keys; None: all
        manifest: that of the checkpoint, if it was read already
        attempt: whose manifest to take, where hosts may have those of several; empty: there is one
        alone: this rank loads by itself, and agrees on nothing with others
        part_of: the load of all ranks that this is a part of, and which has its phases; None: it has its own
        tag: names what ranks agree on; None: they have not met for this load yet
        visible: seconds to wait for a checkpoint that another rank has seen; None: it is there, or there is none
    """

    map_location: Any = None
    strict: bool = False
    allow_dtype_cast: bool = False
    allow_unexpected: bool = True
    resuming: bool = False
    rename: Mapping[str, str] | None = None
    prefix: str = ""
    ignore: Sequence[str] = ()
    modules: Sequence[torch.nn.Module] = ()
    narrow: Callable[[Source], Source] | None = None
    manifest: Mapping[str, Any] | None = None
    attempt: str = ""
    alone: bool = False
    part_of: CollectiveLoad | None = None
    tag: str | None = None
    visible: float | None = None
