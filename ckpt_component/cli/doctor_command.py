"""`ckpt doctor [ROOT]`: check this machine, and a folder for checkpoints, with the operations that a save uses."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Sequence

from ..config.quantities import BYTES
from ..config.schema import Checkpoint
from ..core.options import RecoveryMode
from ..core.outside import OUTSIDE
from ..core.storage.locate import absolute, expanded, is_url, storage_at
from ..errors import CheckpointConfigError
from ..formats.checkpoints import Root
from .config_words import add_config, is_override, with_unit
from .machine_checks import FAILS, NOTE, OK, Finding, check_bucket, check_folder, check_machine, check_packages
from .output import Output, counted, width
from .run_checks import JobPlace, check_hosts, check_memory, host_names

_COLORS = {OK: "green", NOTE: "yellow", FAILS: "red"}


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("root", nargs="?", metavar="ROOT", help="folder of checkpoints, or its URL; it need not exist")
    add_config(parser)
    add("--hosts", metavar="N|NAMES", help="with --config: how many hosts, or node1,node2 or node[1-8] (Slurm's)")
    add("--state", metavar="BYTES", help="with --config: the state of all ranks (that of the newest checkpoint)")
    add("--ranks", type=int, help="with --config: number of ranks (that of the newest checkpoint)")


def run_doctor(parsed: argparse.Namespace, output: Output) -> int:
    """`ckpt doctor [ROOT]`: check this machine, and a folder for checkpoints, with the operations that a save uses.

    Check this machine, what it takes to keep snapshots in its memory, and what is installed; with ROOT the folder:
    sync, rename, locks, free space, direct I/O; of a URL: access, conditional puts, rates. With --config also what that
    needs of the hosts: peers, memory, checkpoint.local.dir. Leaves nothing behind. Exit code 1: saves would fail.

    examples:
      ckpt doctor checkpoints
      ckpt doctor --config +recipe=many_hosts --hosts 'node[1-8]' --ranks 64

    note: works, but slower or with less protection. FAIL: saves would fail;
    the line says what to do.
    """
    if parsed.root is not None and is_override(parsed.root) and not os.path.lexists(parsed.root):
        raise CheckpointConfigError(f"'{parsed.root}' is no folder; did you mean --config {parsed.root}?")
    job = _job(parsed)
    images = None if job is None or job.settings.recovery.mode is RecoveryMode.none else job.images
    findings = [*check_machine(), *check_memory(images), *check_packages()]
    if job is not None:
        findings += check_hosts(job)
    if parsed.root is not None:
        if is_url(parsed.root):
            findings += check_bucket(absolute(parsed.root), parsed.options)
        else:
            findings += check_folder(os.path.abspath(expanded(parsed.root, "ROOT")))
    output.result(findings, _lines(findings, output))
    return int(any(finding.status == FAILS for finding in findings))


def _job(parsed: argparse.Namespace) -> JobPlace | None:
    """What is to be checked of a config, and of the job that has it; None: there is none."""
    if not parsed.config:
        for name in ("hosts", "state", "ranks"):
            if (value := getattr(parsed, name)) is not None:
                raise CheckpointConfigError(
                    f"--{name}={value} is for checking a config; type one too, such as --config +recipe=many_hosts."
                )
        return None
    from .explain_command import composed  # imports Hydra

    if parsed.ranks is not None and parsed.ranks < 1:
        raise CheckpointConfigError(f"--ranks={parsed.ranks} must be above 0.")
    config = composed(parsed.config)
    hosts = parsed.hosts or os.environ.get("SLURM_JOB_NODELIST")
    if hosts is not None:
        names = host_names(hosts)
    else:  # peers need others, and all else works on this host alone
        names = () if config.settings.recovery.mode is RecoveryMode.peers else (OUTSIDE.host_name(),)
    state, ranks, source = _state(parsed, config.settings)
    if ranks is not None and ranks < len(names):
        raise CheckpointConfigError(
            f"{counted(ranks, 'rank')} ({source}) cannot be on {counted(len(names), 'host')}; type --ranks, or fewer "
            "--hosts."
        )
    are_names = hosts is not None and not hosts.strip().isdecimal()
    return JobPlace(config.settings, config.sizes.arenas, names, are_names, state, ranks, source)


def _state(parsed: argparse.Namespace, settings: Checkpoint) -> tuple[float | None, int | None, str]:
    """The bytes of the state, the number of ranks, and their source: what is not given, the newest checkpoint tells."""
    state, ranks = None if parsed.state is None else with_unit(parsed.state, BYTES, "--state", "1.2TB"), parsed.ranks
    if state is not None and ranks is not None:
        return state, ranks, "--state, --ranks"
    root = absolute(settings.dir)
    found = Root(storage_at(root, options=parsed.options), root)
    if not found.committed:
        return state, ranks, "--state" if ranks is None else "--ranks"
    step = found.committed[-1]
    manifest = next(scan.manifests[step] for scan in found.scans.values() if step in scan.manifests)
    saved = float(sum(entry["size"] for entry in manifest["files"]))
    return state or saved, ranks or int(manifest["world_size"]), f"as step {step}"


def _lines(findings: Sequence[Finding], output: Output) -> Iterator[str]:
    column = max(len(finding.what) for finding in findings)
    for finding in findings:
        status = output.style(f"{finding.status:<4}", _COLORS[finding.status])
        indent = " " * (column + 8)
        first, *others = textwrap.wrap(finding.text, width() - len(indent))
        yield f"{status}  {finding.what:<{column}}  {first}"
        for line in (*others, *textwrap.wrap(f"-> {finding.fix}" if finding.fix else "", width() - len(indent))):
            yield f"{indent}{line}"
