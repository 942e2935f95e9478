"""Checks of the machine: system, memory, and the writer process."""

from __future__ import annotations

import glob
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator

import psutil

from ...config.rules import other_platform
from ...core.pages import HUGE_PAGE, SharedPages
from ...core.storage.checksum import fastest, find_checksum
from ...core.storage.space import amount
from ...core.writing.process import ByteProcess
from ...errors import CheckpointError
from .finding import FAILS, NOTE, OK, Finding

_START_SECONDS = 30.0


def check_machine() -> Iterator[Finding]:
    """Check this machine."""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    refused = other_platform()
    if refused:
        yield Finding("system", FAILS, system, refused)
        return
    yield Finding("system", OK, f"{system}, {len(os.sched_getaffinity(0))} CPU cores")
    yield from _memory()
    yield _page_lock()
    yield _writer_process()
    package = find_checksum("crc32").package
    if package == "zlib":
        fix = "ten times faster: pip install isal"
        yield Finding("checksums", NOTE, "crc32 by zlib, 3 to 5 GB/s per thread", fix)
    else:
        yield Finding("checksums", OK, f"crc32 by {package}; checkpoint.writer.checksum=auto takes {fastest().name}")


def _memory() -> Iterator[Finding]:
    if not hasattr(os, "memfd_create"):
        yield Finding("memfd", FAILS, "this Python has no os.memfd_create", "use checkpoint=sync")
        return
    try:
        pages = SharedPages(2 * HUGE_PAGE)
        try:
            not_huge = pages.allocate(threads=1)
        finally:
            os.close(pages.fd)
    except OSError as error:
        yield Finding("memfd", FAILS, f"shared memory cannot be made: {error}", "free memory, or use checkpoint=sync")
        return
    free = amount(psutil.virtual_memory().available)
    yield Finding("memfd", OK, f"snapshots may share memory with the writer process; {free} available")
    if not_huge:
        fix = "Linux 6.1 or newer has them for shared memory; until then copies are slower"
        yield Finding("huge pages", NOTE, f"not for snapshots: {os.strerror(not_huge)}", fix)
    else:
        yield Finding("huge pages", OK, "snapshots get them")


def _page_lock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else amount(soft)
    if not glob.glob("/dev/nvidia[0-9]*"):
        return Finding("page-lock limit", OK, f"{limit}; no NVIDIA device here, so nothing is page-locked")
    if soft == resource.RLIM_INFINITY:
        return Finding("page-lock limit", OK, limit)
    return Finding("page-lock limit", NOTE, limit, "if page-locking fails, raise it: ulimit -l unlimited")


def _writer_process() -> Finding:
    started = time.perf_counter()
    try:
        process = ByteProcess(_START_SECONDS)
    except (CheckpointError, OSError) as error:
        return Finding("writer process", FAILS, f"{sys.executable}: {error}", "use checkpoint/caller=inline")
    took = time.perf_counter() - started
    process.close(_START_SECONDS)
    return Finding("writer process", OK, f"starts in {1e3 * took:.0f} ms")
