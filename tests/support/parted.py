"""Folders of several hosts, each with the files of its own: made by hand from a save of several ranks into one folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kept_configs import compose_once
from rank_threads import rank_threads

from ckpt_component import build_checkpointer
from ckpt_component.core.commit.manifest import encode_manifest
from ckpt_component.core.commit.names import MANIFEST, MEGATRON
from ckpt_component.core.coordination import StoreCoordinator

_OF_RANK = re.compile(r"(?:integrity-|__)(\d+)")


def save_on_hosts(folder: Path, hosts: Sequence[str], *steps: int, elements: int = 1000, run: str = "me") -> None:
    """Save steps with a rank on each host, whose local folder has the host's name.

    Args:
        folder: of the local folders
        hosts: their names; the first one is the leading rank's
        *steps: which
        elements: of the tensor of each rank
        run: token of the run
    """
    config = compose_once("sync", ["checkpoint.durability=process_crash"])

    def save(step: int, ranks: StoreCoordinator) -> None:
        state = {f"of_{ranks.rank}": torch.full((elements,), float(step)), f"object_{ranks.rank}": [step]}
        with build_checkpointer(config, ranks=ranks) as checkpointer:
            checkpointer.save(state, folder / "whole" / MEGATRON.folder(step))

    for step in steps:
        with rank_threads(len(hosts)) as on_all:
            assert on_all(partial(save, step)) == [None] * len(hosts)
        _part(folder / "whole" / MEGATRON.folder(step), folder, hosts, run)


def _part(whole: Path, folder: Path, hosts: Sequence[str], run: str) -> None:
    """Give each host the manifest and the files of its rank, as in a storage without renames."""
    manifest: dict[str, Any] = json.loads((whole / MANIFEST).read_bytes())["manifest"]
    files: dict[str, list[str]] = {host: [] for host in hosts}
    for entry in manifest["files"]:
        match = _OF_RANK.match(entry["name"])
        files[hosts[int(match[1]) if match else 0]].append(entry["name"])
    manifest |= {"at": manifest["attempt"], "run": run} | ({"hosts": files} if len(hosts) > 1 else {})
    for host, names in files.items():
        data = folder / host / whole.name / manifest["at"]
        data.mkdir(parents=True)
        for name in names:
            os.link(whole / name, data / name)
        (data.parent / MANIFEST).write_bytes(encode_manifest(manifest))
    shutil.rmtree(whole)
