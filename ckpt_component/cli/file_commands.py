"""`ckpt export`, `import` and `pull`: files for other programs, checkpoints of theirs, and published weights."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.commit.names import MAX_STEP, MEGATRON, NAMINGS
from ..core.commit.scan import repair_pointer, scan_steps
from ..core.progress import progress_bar
from ..core.storage.locate import absolute, file_storage, storage_at
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from ..events import SaveReport
from ..exporting.blocks import check_dtype
from ..exporting.export import CONFIG, FORMATS, MAX_SHARD_BYTES, Exported, ExportOptions, export_checkpoint
from ..formats.checkpoints import find_checkpoint
from ..publishing.local_copy import Pulled
from ..publishing.receiver import Receiver
from .output import Output, age_text, counted, duration
from .roots import shown

logger = logging.getLogger(__name__)


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("format", metavar="FORMAT", help=f"{', '.join(FORMATS)}")
    parser.add_argument("checkpoint", metavar="CKPT", help="the checkpoint, of any format that loads; or ROOT@newest")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create for hf, else a file")
    parser.add_argument("--prefix", metavar="NAME", help="only what is below NAME, and without that prefix: model")
    add_key_map(parser)
    parser.add_argument("--dtype", help="convert floating-point tensors: float64, float32, float16, bfloat16")
    parser.add_argument("--max-shard-size", metavar="BYTES", help="the most tensors in a file of hf (5GB)")
    parser.add_argument(
        "--config-from", type=Path, metavar="FOLDER", help="copy config.json and tokenizer files from there"
    )
    parser.add_argument("--replace", action="store_true", help="replace an export that is there, in one step")


def add_key_map(parser: argparse.ArgumentParser) -> None:
    """Add `--rename` and `--ignore`."""
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename keys, as checkpoint.load.rename: h.*.attn=blocks.*.attention; may be repeated",
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="NAME", help="leave out keys; * is any text; may be repeated"
    )


def renames(texts: Sequence[str]) -> dict[str, str]:
    """The values of `--rename`.

    Raises:
        CheckpointConfigError: one has no `=`
    """
    for text in texts:
        if "=" not in text:
            raise CheckpointConfigError(f"--rename={text} has no new name; type --rename={text}=NEW.")
    return dict(text.split("=", 1) for text in texts)


def run_export(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt export hf|safetensors|torch CKPT OUT`: files that other programs read.

    Write tensors of a checkpoint to files that other programs read: hf, a folder that from_pretrained and safetensors
    read; safetensors or torch, one file. Streams, so that it needs little memory, and torch only for the format torch
    and for checkpoints of other programs. OUT appears whole or not at all, and checksums are verified.

    example:
      ckpt export hf checkpoints@200 exported --dtype bfloat16 --config-from base

    hf without --prefix exports the model, if the state has one;
    --prefix '' exports everything.
    hf and safetensors hold tensors only: objects are named once and left
    out. Tied tensors are stored once, under their first name. torch holds
    the nested state; load it with torch.load(OUT, weights_only=True), or
    False if it has numpy values.
    """
    check_dtype("--dtype", parsed.dtype)
    most = MAX_SHARD_BYTES
    if parsed.max_shard_size is not None:
        from ..config.quantities import BYTES, quantity

        most = int(quantity(parsed.max_shard_size, BYTES, "--max-shard-size"))
    options = ExportOptions(
        parsed.format,
        parsed.prefix,
        renames(parsed.rename),
        parsed.ignore,
        parsed.dtype,
        most,
        str(parsed.config_from or ""),
        parsed.replace,
    )
    source = find_checkpoint(parsed.checkpoint, parsed.options)
    done = export_checkpoint(source.path, str(parsed.out), options, file_storage(), progress_bar, source.fs)
    output.result(done._asdict(), _lines(done, options))


def _lines(done: Exported, options: ExportOptions) -> Iterator[str]:
    files = counted(len(done.files), "file")
    yield f"{done.path}: {counted(done.tensors, 'tensor')}, {amount(done.nbytes)}, {files} in {done.seconds:.1f} s"
    if done.tied:
        (first, kept), *more = done.tied.items()
        yield f"tied: {first} is {kept}{f', and {len(more)} more' if more else ''}; stored once"
    if options.format == "hf" and CONFIG not in done.files:
        yield "from_pretrained needs config.json beside the weights: copy it, or use --config-from FOLDER"


def import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("source", metavar="SRC", help="the checkpoint, a folder or a file")
    parser.add_argument("root", metavar="ROOT", help="the folder of checkpoints; it may be new")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step that a run continues after")
    add_key_map(parser)
    parser.add_argument("--prefix", default="", metavar="NAME", help="put NAME before all keys: model")


def run_import(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt import SRC ROOT --step N`: a checkpoint of another program becomes one of ours.

    Write a checkpoint of torch.save, safetensors, Hugging Face, Lightning, stock DCP or Megatron (torch_dist) as a
    committed checkpoint of the format dcp, with checksums. Tensors are read one at a time.

    example:
      ckpt import base_model checkpoints --step 0 --prefix model

    A run on any number of ranks resumes from the result.
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


def pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("source", metavar="SOURCE", help="folder or URL of the versions; ckpt ls lists them")
    parser.add_argument("folder", metavar="FOLDER", help="the folder on this host; it is made if there is none")
    parser.add_argument("--follow", action="store_true", help="go on with each newer version")
    parser.add_argument("--version", dest="number", type=int, metavar="N", help="this version, not the newest")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="for the version, if it is not there yet (0)")
    parser.add_argument("--poll", type=float, metavar="SECONDS", help="between two looks of --follow (1)")
    parser.add_argument("--replace", action="store_true", help="take FOLDER over if it comes from another source")


def run_pull(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt pull SOURCE FOLDER`: bring a folder to a version of published weights, once or as they come.

    Bring FOLDER on this host to a version of the weights that a training run publishes (checkpoint.publish.to). FOLDER
    is a Hugging Face folder, whole at any time: the version is made beside it, verified, and exchanged with it in one
    step. Only what changed is read where the source has it.

    example:
      ckpt pull /shared/run/weights /local/model --wait 600
      ckpt pull s3://bucket/run/weights /local/model --follow

    FOLDER needs room for the weights twice. --follow goes on until Ctrl-C or
    SIGTERM, prints a line for each version, and skips what is older than the
    newest. With --json it prints one object a line.
    """
    _check(parsed)
    with Receiver(
        parsed.source, parsed.folder, options=parsed.options, replace=parsed.replace, progress=progress_bar
    ) as receiver:
        if parsed.follow:
            _follow(receiver, 1.0 if parsed.poll is None else parsed.poll, output)
            return
        pulled = receiver.pull(parsed.number, parsed.wait or 0.0)
        output.result(_data(pulled), [_line(pulled)])


def _check(parsed: argparse.Namespace) -> None:
    for name in ("wait", "poll"):
        value = getattr(parsed, name)
        if value is not None and not value >= 0:
            raise CheckpointConfigError(f"--{name}={value}: give seconds, 0 or above.")
    if parsed.follow and parsed.number is not None:
        raise CheckpointConfigError("--follow goes on with the newest version; leave --version out.")
    if parsed.follow and parsed.wait is not None:
        raise CheckpointConfigError("--follow waits for versions as long as it runs; leave --wait out.")
    if parsed.poll is not None and not (parsed.follow and parsed.poll > 0):
        raise CheckpointConfigError(f"--poll={parsed.poll} is for --follow, in seconds above 0.")


def _follow(receiver: Receiver, poll_seconds: float, output: Output) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end it, and with success
    try:
        for pulled in receiver.follow(poll_seconds):
            output.record(_data(pulled), _line(pulled))
    except KeyboardInterrupt:
        return


def _data(pulled: Pulled) -> dict[str, Any]:
    """What `--json` prints: how many tensors changed, not which."""
    return asdict(pulled) | {"changed": None if pulled.changed is None else len(pulled.changed)}


def _line(pulled: Pulled) -> str:
    """`version 7, step 700: 12.34 MB in 0.52 s, 3 s after its commit`."""
    step = "" if pulled.step is None else f", step {pulled.step}"
    if not pulled.nbytes:
        return f"version {pulled.version}{step}: {shown(pulled.path)} has it already"
    what = "whole" if pulled.changed is None else f"{counted(len(pulled.changed), 'tensor')} changed"
    lag = "" if pulled.lag is None else f", {age_text(pulled.lag)} after the commit"
    return f"version {pulled.version}{step}: {what}, {amount(pulled.nbytes)} in {duration(pulled.seconds)}{lag}"
