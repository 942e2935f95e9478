"""The promises: ratios of figures of one run, some of them to raw hardware speed measured next to the same row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .measure.row_kinds import ROWS, rows_of
from .row_figures import fact, spread, why_not
from .runs import Case
from .verdicts import Measured, Missing, Verdict, at_least, at_most, best_of, figure_of, limit_of, raw_of, reported

_ASYNC = ("async_persistent", "async_persistent_fast", "async_pinned", "async_temporal", "async_zero_overhead")
#: The recommended preset, whose times are compared with the disk and the peers: with zlib's checksum, which is always
#: available, and with the fastest installed.
_USUAL, _FAST = "async_persistent", "async_persistent_fast"
#: One row writes while it stages, the other stages first.
_FASTEST = ("async_zero_overhead_fast", _FAST)
_DCP = ("dcp_save_t1", "dcp_save_t2")
_RAW_WRITES = ("raw_write_2", "raw_direct_2", "raw_direct_4")
_OTHERS = tuple(rows_of("torch", "peers"))
_OTHERS_THAT_FSYNC = tuple(row for row in _OTHERS if ROWS[row].fsyncs)
#: The memory of smaller states cannot be distinguished from other memory of a process.
_TELLING_BYTES = 100 << 20


def judge(cases: Sequence[Case], *, cores: int, loop_threads: int) -> list[Verdict]:
    """Check the figures of one run against all promises.

    Args:
        cases: the figures
        cores: number of CPU cores; some promises need a free core
        loop_threads: threads of the simulated training loop
    """
    large_disk = _case(cases, "large", "disk")
    # Each row separately: the best of several rows would profit from chance.
    verdicts = [
        at_most(
            f"training time lost, {row}, large on disk, over the best peer whose snapshot is whole",
            1 / 3,
            figure_of(large_disk, row, "lost"),
            best_of(large_disk, _OTHERS, "lost", whole=True),
        )
        for row in (_USUAL, "async_zero_overhead")
    ]
    for state in ("large", "many_small"):
        for target in ("disk", "tmpfs"):
            verdicts += _stalls(_case(cases, state, target), f"{state} on {target}")
    verdicts += _durable(cases)
    for state, faster in (("large", 2), ("many_small", 20)):
        for target in ("disk", "tmpfs"):
            verdicts += _loads(_case(cases, state, target), f"{state} on {target}", faster, cold=target == "disk")
    for case in cases:
        verdicts += _memory(case)
        verdicts += _steps(case, cores, loop_threads)
        verdicts.append(_whole(case))
    return verdicts


def _stalls(case: Case | Missing, where: str) -> Iterator[Verdict]:
    pinned = limit_of(case, "d2h")
    if not isinstance(pinned, Missing):  # the state is on a CUDA device
        yield at_least(
            f"staging by async_pinned, {where}: one copy into page-locked memory over it",
            0.9,
            pinned,
            figure_of(case, "async_pinned", "staged"),
        )
    for row in () if isinstance(pinned, Measured) else ("async_persistent", "async_pinned"):
        yield at_most(
            f"time until the tensors may be changed, {row}, {where}, over one warm memcpy",
            1.2,
            figure_of(case, row, "staged"),
            raw_of(case, row, "raw_copy"),
        )
    yield at_most(
        f"stall of async_zero_overhead, {where}, over the least of all peers",
        1,
        figure_of(case, "async_zero_overhead", "stall"),
        best_of(case, _OTHERS, "stall"),
    )


def _durable(cases: Sequence[Case]) -> Iterator[Verdict]:
    disk, tmpfs = (_case(cases, "large", target) for target in ("disk", "tmpfs"))
    text = "durable save, large on disk: the best raw write over ours"
    yield at_least(f"{text}, crc32", 0.75, raw_of(disk, _USUAL, *_RAW_WRITES), figure_of(disk, _USUAL, "durable"))
    yield from _written(disk, "large on disk", 0.9)
    text = "durable save, large on tmpfs: the best raw write over ours"
    yield reported(f"{text}, crc32", raw_of(tmpfs, _USUAL, *_RAW_WRITES), figure_of(tmpfs, _USUAL, "durable"))
    yield from _written(tmpfs, "large on tmpfs", 0.8)
    for target, case in (("disk", disk), ("tmpfs", tmpfs)):
        yield at_least(
            f"durable save, large on {target}: the fastest peer that fsyncs over ours",
            1,
            best_of(case, _OTHERS_THAT_FSYNC, "durable"),
            figure_of(case, _USUAL, "durable"),
        )
    small = _case(cases, "many_small", "disk")
    stock, text = best_of(small, _DCP, "durable"), "durable save, many_small on disk: dcp.save over ours"
    yield at_least(f"{text}, crc32", 10, stock, figure_of(small, _USUAL, "durable"))
    for row in _FASTEST:
        yield at_least(f"{text}, {row}", 20, stock, _fast(small, row, "durable"))
    yield at_least(
        "durable save, many_small on disk: torch.save without fsync over ours",
        1,
        figure_of(small, "torch_save", "complete"),
        figure_of(small, _USUAL, "durable"),
    )


def _written(case: Case | Missing, where: str, bound: float) -> Iterator[Verdict]:
    """With a fast checksum only the background time is promised; with the preceding copy it is only reported."""
    for row in _FASTEST:
        raw, text = raw_of(case, row, *_RAW_WRITES), f"{where}: the best raw write over ours, {row}"
        yield at_least(f"background save, {text}", bound, raw, _fast(case, row, "background"))
        yield reported(f"durable save, {text}", raw, _fast(case, row, "durable"))


def _loads(case: Case | Missing, where: str, faster: float, cold: bool) -> Iterator[Verdict]:
    for row in (_USUAL, _FAST):
        for cache in ("warm", "cold") if cold else ("warm",):
            yield at_least(
                f"load, {where}, {cache}: reading the bytes with their checksum over {row}",
                0.8,
                raw_of(case, row, f"raw_read_{cache}"),
                _of_row(case, row, f"load_{cache}"),
            )
        yield at_least(
            f"load, {where}, warm: dcp.load over {row}",
            faster,
            best_of(case, _DCP, "load_warm"),
            _of_row(case, row, "load_warm"),
        )


def _of_row(case: Case | Missing, row: str, figure: str) -> Measured | Missing:
    return _fast(case, row, figure) if row == _FAST else figure_of(case, row, figure)


def _fast(case: Case | Missing, row: str, figure: str) -> Measured | Missing:
    """A figure of a row with the fastest checksum, unless that is zlib's."""
    if not isinstance(case, Missing) and fact(case, row, "checksum_by") == "zlib":
        return "no faster checksum than zlib's is installed: pip install isal"
    return figure_of(case, row, figure)


def _memory(case: Case) -> Iterator[Verdict]:
    for row in _ASYNC:
        if row not in case.rows:
            continue
        arenas, nbytes = fact(case, row, "arenas"), fact(case, row, "state_bytes")
        allowed: Measured | Missing = f"{row} {why_not(case, row)}"
        if arenas is not None and nbytes is not None and nbytes < _TELLING_BYTES:
            allowed = "the state is too small to tell it from the rest"
        elif arenas is not None and nbytes is not None:
            allowed = Measured(f"{arenas} x {nbytes / 1e9:.2f} GB", arenas * nbytes)
        yield at_most(
            f"memory of {row}, {case.state} on {case.target}, over one state per arena",
            1.1,
            figure_of(case, row, "memory"),
            allowed,
        )


def _steps(case: Case, cores: int, loop_threads: int) -> Iterator[Verdict]:
    for row in _ASYNC:
        if row not in case.rows:
            continue
        ratio = figure_of(case, row, "step_ratio")
        if loop_threads >= cores:
            ratio = f"no core is free: the loop has {loop_threads} of {cores}"
        elif (fact(case, row, "state_bytes") or 0) < _TELLING_BYTES:
            ratio = ratio if isinstance(ratio, Missing) else "the state is too small: the save is over at once"
        elif isinstance(ratio, Missing) and why_not(case, row) is None:
            ratio = "the save was complete within three steps"
        yield at_most(
            f"step time while {row} writes, {case.state} on {case.target}, over the undisturbed",
            1.03,
            ratio,
            Measured("undisturbed", 1.0),
        )


def _whole(case: Case) -> Verdict:
    measured = {row: found for row in rows_of("ours") if (found := spread(case, row, "torn")) is not None}
    text = f"torn tensors in snapshots of ours, {case.state} on {case.target}, none"
    if not measured:
        return Verdict(text, None, None, "no row of ours was measured")
    torn = max(found.high for found in measured.values())
    return Verdict(text, torn, torn == 0, ", ".join(measured))


def _case(cases: Sequence[Case], state: str, target: str) -> Case | Missing:
    found = [case for case in cases if (case.state, case.target) == (state, target)]
    return found[0] if found else f"{state} on {target} is not in this run"
