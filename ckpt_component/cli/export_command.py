"""`ckpt export hf|safetensors|torch CKPT OUT`: files that other programs read.

Write tensors of a checkpoint to files that other programs read: hf, a folder that from_pretrained and safetensors
read; safetensors or torch, one file. Streams, so that it needs little memory, and torch only for the format torch and
for checkpoints of other programs. OUT appears whole or not at all, and checksums are verified.

example:
  ckpt export hf checkpoints@200 exported --dtype bfloat16 --config-from base

hf without --prefix exports the model, if the state has one;
--prefix '' exports everything.
hf and safetensors hold tensors only: objects are named once and left
out. Tied tensors are stored once, under their first name. torch holds
the nested state; load it with torch.load(OUT, weights_only=True), or
False if it has numpy values.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core.progress import progress_bar
from ..core.storage.locate import file_storage
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from ..exporting.blocks import check_dtype
from ..exporting.export import CONFIG, FORMATS, MAX_SHARD_BYTES, Exported, ExportOptions, export_checkpoint
from ..formats.checkpoints import find_checkpoint
from .output import Output
from .text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Export.

    Raises:
        CheckpointConfigError: an argument is invalid
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
