"""`ckpt import SRC ROOT --step N`: a checkpoint of another program becomes one of ours.

Write a checkpoint of torch.save, safetensors, Hugging Face, Lightning, stock DCP or Megatron (torch_dist) as a
committed checkpoint of the format dcp, with checksums. Tensors are read one at a time.

example:
  ckpt import base_model checkpoints --step 0 --prefix model

A run on any number of ranks resumes from the result.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.commit.names import MAX_STEP, MEGATRON, NAMINGS
from ..core.commit.scan import repair_pointer, scan_steps
from ..core.storage.locate import absolute, storage_at
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from ..events import SaveReport
from ..formats.checkpoints import find_checkpoint
from .export_command import add_key_map, renames
from .output import Output
from .text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint, a folder or a file")
    parser.add_argument("root", metavar="ROOT", help="the folder of checkpoints; it may be new")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step that a run continues after")
    add_key_map(parser)
    parser.add_argument("--prefix", default="", metavar="NAME", help="put NAME before all keys: model")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Import.

    Raises:
        CheckpointError: as a load of the source, and as a save
    """
    if not 0 <= parsed.step <= MAX_STEP:
        raise CheckpointConfigError(f"--step={parsed.step} must be from 0 to {MAX_STEP}.")
    source, root = find_checkpoint(parsed.source, parsed.options).path, absolute(parsed.root)
    fs = storage_at(root, options=parsed.options)
    scans = {names: scan_steps(fs, root, names) for names in NAMINGS.values()}
    names = next((names for names, scan in scans.items() if scan.occupied), MEGATRON)
    from ..config.hydra.compose import compose_checkpoint
    from ..factory.graph import build_checkpointer

    config: Any = compose_checkpoint("sync")
    config.storage.options = parsed.options
    config.stager = {
        "_target_": "ckpt_component.cli.import_stager.ImportStager",
        "path": source,
        "rename": renames(parsed.rename),
        "prefix": parsed.prefix,
        "ignore": parsed.ignore,
        "options": parsed.options,
    }
    path = os.path.join(root, names.folder(parsed.step))
    with _unlogged_failure(), build_checkpointer(config) as checkpointer:
        checkpointer.save({}, path)
        report = checkpointer.last_report or SaveReport(path)
    repair_pointer(fs, root, names, scan_steps(fs, root, names).committed)
    data = {"path": path, "step": parsed.step, "items": report.items, "bytes": report.bytes}
    text = f"{path}: {counted(report.items, 'item')}, {amount(report.bytes)} in {report.committed_s:.1f} s"
    output.result({**data, "seconds": report.committed_s}, [text])


@contextmanager
def _unlogged_failure() -> Iterator[None]:
    """The save raises its error, so it need not be logged too."""
    saving = logging.getLogger("ckpt_component.saving")
    level = saving.level
    saving.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        saving.setLevel(level)
