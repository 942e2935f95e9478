"""`ckpt verify CKPT|ROOT`: compare all bytes with their checksums."""

from __future__ import annotations

import argparse
import logging
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...catalogue.inspection import Inspection, inspect
from ...catalogue.verification import Damage, Item, verify_items
from ...errors import CheckpointError, CheckpointUnreadableError, first_keys
from ...progress import progress_bar
from ...storage.file_system import file_system
from ...storage.space import amount
from .app import FAILED, NO
from .checkpoints import find_checkpoint, matching_keys
from .output import Output
from .roots import is_whole_root, shown
from .verified_ranges import VerifiedRanges, state_path

logger = logging.getLogger(__name__)

#: How many damaged places the text names.
_NAMED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Read a checkpoint, or all of a folder, and compare every byte with the checksums taken at the save. Needs no "
        "torch. Of other programs' checkpoints it checks sizes and structure, and the CRCs of zip archives. Exit code "
        "1: something is damaged."
    )
    parser.epilog = "example:\n  ckpt verify checkpoints@200 --key 'model.*'"
    parser.add_argument("checkpoint", metavar="CKPT|ROOT", help="ROOT/iter_0000200, ROOT@newest, or all below ROOT")
    parser.add_argument("--key", metavar="PATTERN", help="only keys that match, such as 'model.*', or are below it")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="continue a verification that was cut off; FILE: with the state there, instead of the cache folder",
    )


def run(parsed: argparse.Namespace, output: Output) -> int | None:
    """Verify.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no key matches.
        CheckpointError: it cannot be verified here.
    """
    paths, results = _paths(parsed.checkpoint), list[dict[str, Any]]()

    def verified() -> Iterator[dict[str, Any]]:
        for path in paths:
            try:
                results.append(_verify(path, parsed.key, parsed.resume))
            except CheckpointError as error:
                if len(paths) == 1:
                    raise
                results.append({"path": path, "state": "unknown", "error": str(error), "damaged": []})
            yield results[-1]

    if output.as_json:
        deque(verified(), 0)
    output.result({"checkpoints": results}, lambda: (line for each in verified() for line in _lines(each, output)))
    if any(result["damaged"] for result in results):
        return NO
    return FAILED if any(result["state"] == "unknown" for result in results) else None


def _paths(argument: str) -> list[str]:
    """The checkpoint, or all that are or should be checkpoints in a folder."""
    checkpoint = find_checkpoint(argument)
    if checkpoint.root is None or not is_whole_root(argument, checkpoint):
        return [checkpoint.path]
    return [path for _, path in sorted(checkpoint.root.paths.items())]


def _verify(path: str, pattern: str | None, resume: str | None) -> dict[str, Any]:
    started = time.perf_counter()
    inspection = inspect(file_system(durable=True), path)
    items, damages = inspection.items, inspection.damages
    if pattern is not None:
        keys, chosen = _matching(inspection, pattern)
        data = {item.file for item in [*items, *inspection.lost]}
        items = list(filter(chosen, items))
        lost = {item.file for item in filter(chosen, inspection.lost)}
        damages = [damage for damage in damages if damage.file not in data or damage.file in lost]
    state = VerifiedRanges(
        resume or state_path(path), path, inspection.folder, inspection.sizes, resume=resume is not None
    )
    left = [item for item in items if item not in state]
    try:
        verify_items(inspection.folder, left, damages.append, done=state.add, progress=progress_bar, shared=False)
    except BaseException:
        state.save()
        logger.warning("cut off; to continue, add --resume to the command")
        raise
    state.delete()
    nbytes = sum(item.length for item in set(items))
    result: dict[str, Any] = {
        "path": path,
        "state": "damaged" if damages else "verified" if inspection.verifiable else "unverified",
        "own": inspection.own,
        "bytes": nbytes,
        "items": len(items),
        "files": len(inspection.sizes),
        "file_bytes": sum(inspection.sizes.values()),
        "resumed_bytes": nbytes - sum(item.length for item in set(left)),
        "seconds": round(time.perf_counter() - started, 3),
        "damaged": [],
    }
    if pattern is not None:
        result["keys"] = len(keys)
    if damages:
        names = _keys_of(inspection, damages)
        result["damaged"] = [
            {
                "file": damage.file,
                "keys": names.get(number, []),
                "offset": None if damage.item is None else damage.item.offset,
                "length": None if damage.item is None else damage.item.length,
                "unreadable": isinstance(damage.error, CheckpointUnreadableError),
                "error": str(damage.error),
            }
            for number, damage in enumerate(damages)
        ]
    return result


def _matching(inspection: Inspection, pattern: str) -> tuple[set[str], Callable[[Item], bool]]:
    """The keys that match a pattern, or are below it, and whether an item has bytes of one."""
    stored = [*inspection.stored_keys()]
    keys = set(matching_keys([*dict.fromkeys(key for key, *_ in stored)], pattern, inspection.path))
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for key, file, start, end in stored:
        if key in keys:
            places[file].append((start, end))
    overlapping = _overlaps(places)
    return keys, lambda item: bool(next(overlapping(item), None) is not None)


def _overlaps(places: dict[str, list[tuple[int, int]]]) -> Callable[[Item], Iterator[tuple[int, int]]]:
    """A function that gives the ranges of its file that an item overlaps; ranges overlap each other rarely."""
    for ranges in places.values():
        ranges.sort()
    longest = {file: max(end - start for start, end in ranges) for file, ranges in places.items()}

    def overlapping(item: Item) -> Iterator[tuple[int, int]]:
        ranges = places.get(item.file, [])
        first = bisect_right(ranges, (item.offset - longest.get(item.file, 0), -1))
        for start, end in ranges[first:]:
            if start >= item.end:
                return
            if end > item.offset:
                yield start, end

    return overlapping


def _keys_of(inspection: Inspection, damages: Iterable[Damage]) -> dict[int, list[str]]:
    """The keys whose bytes are damaged, by the number of the damage."""
    at: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for key, file, start, end in inspection.stored_keys():
        at[file, start, end].append(key)
        places[file].append((start, end))
    overlapping = _overlaps(places)

    def keys(damage: Damage) -> list[str]:
        items = [item for item in inspection.lost if item.file == damage.file] if damage.item is None else [damage.item]
        return [key for item in items for place in overlapping(item) for key in at[(item.file, *place)]]

    return {number: keys(damage) for number, damage in enumerate(damages)}


def _lines(result: dict[str, Any], output: Output) -> Iterator[str]:
    """The text for one checkpoint."""
    path, damaged = shown(result["path"]), result["damaged"]
    if "error" in result:
        yield f"{path}: {output.style('not verified', 'yellow')}: {result['error']}"
        return
    files = f"{result['files']} file{'s' * (result['files'] != 1)}"
    data = f"{amount(result['bytes'])} in {result['items']} items of {files}"
    if "keys" in result:
        data = f"{result['keys']} key{'s' * (result['keys'] != 1)}, {amount(result['bytes'])}"
    if not damaged and result["state"] == "verified":
        earlier = f", {amount(result['resumed_bytes'])} of it before" if result["resumed_bytes"] else ""
        by = "" if result["own"] else " by the CRCs of its archives"
        yield f"{path}: {output.style('verified', 'green')}{by}, {data} in {result['seconds']:.2f} s{earlier}"
    elif not damaged:
        some = f"; {data} match the CRCs of their archives" if result["items"] else ""
        yield (
            f"{path}: {output.style('unverified: no checksums', 'yellow')}; sizes and structure are right ({files}, "
            f"{amount(result['file_bytes'])}){some}"
        )
    else:
        yield f"{path}: {output.style('damaged', 'red')}"
        for each in damaged[:_NAMED]:
            keys = f": {first_keys(each['keys'], 5)}" if each["keys"] else ""
            if each["offset"] is None or each["unreadable"]:
                yield f"  {each['error']}{f' Its keys{keys}' if keys else ''}"
            else:
                yield f"  {each['file']}, bytes {each['offset']} to {each['offset'] + each['length']}{keys}"
        if len(damaged) > _NAMED:
            yield f"  and {len(damaged) - _NAMED} more (--json lists all)"
