"""`ckpt doctor [ROOT]`: check this machine, and a folder for checkpoints, with the operations that a save uses.

Check this machine, what it takes to keep snapshots in its memory, and what is installed; with ROOT the folder: sync,
rename, locks, free space, direct I/O; of a URL: access, conditional puts, rates. Leaves nothing behind. Exit code 1:
saves would fail.

example:
  ckpt doctor checkpoints

note: works, but slower or with less protection. FAIL: saves would fail;
the line says what to do.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Sequence

from ..core.storage.locate import absolute, expanded, is_url
from .health.bucket_checks import check_bucket
from .health.finding import FAILS, NOTE, OK, Finding
from .health.folder_checks import check_folder
from .health.machine_checks import check_machine
from .health.memory_checks import check_memory
from .health.package_checks import check_packages
from .output import Output, width

_COLORS = {OK: "green", NOTE: "yellow", FAILS: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("root", nargs="?", metavar="ROOT", help="folder of checkpoints, or its URL; it need not exist")


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Print what was found.

    Raises:
        CheckpointConfigError: ROOT is empty, or a URL whose scheme has no package here
    """
    findings = [*check_machine(), *check_memory(), *check_packages()]
    if parsed.root is not None:
        if is_url(parsed.root):
            findings += check_bucket(absolute(parsed.root), parsed.options)
        else:
            findings += check_folder(os.path.abspath(expanded(parsed.root, "ROOT")))
    output.result(findings, _lines(findings, output))
    return int(any(finding.status == FAILS for finding in findings))


def _lines(findings: Sequence[Finding], output: Output) -> Iterator[str]:
    column = max(len(finding.what) for finding in findings)
    for finding in findings:
        status = output.style(f"{finding.status:<4}", _COLORS[finding.status])
        indent = " " * (column + 8)
        first, *others = textwrap.wrap(finding.text, width() - len(indent))
        yield f"{status}  {finding.what:<{column}}  {first}"
        for line in (*others, *textwrap.wrap(f"-> {finding.fix}" if finding.fix else "", width() - len(indent))):
            yield f"{indent}{line}"
