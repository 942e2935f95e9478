"""`ckpt verify CKPT|ROOT...`: compare all bytes with their checksums.

Read checkpoints, or all of a folder, and compare every value with the checksums taken at the save; a file that several
of them share is read once. Needs no torch. Of other programs' checkpoints it checks sizes and structure, and the CRCs
in files of torch.save. Exit code 1: something is damaged; 2: only a part is here, and other hosts have the rest.

example:
  ckpt verify checkpoints@200 --key 'model.*'

What was verified is noted every few seconds in ~/.cache/ckpt_component.
--resume skips it if no file of the checkpoint has changed since.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

from ..core.progress import progress_bar
from ..core.storage.space import amount
from ..core.storage.storage import Storage
from ..errors import CheckpointError, CheckpointUnreadableError, first_keys
from ..formats.checkpoints import find_checkpoint, matching_keys
from ..formats.rank_index import StoredRange
from ..formats.verification import Damage, Inspection, inspect, verify_items
from .app import FAILED, NO
from .output import Output
from .roots import shown
from .shared_files import CheckpointsOfFiles, SharedFiles
from .text import counted
from .verified_items import VerifiedItems

logger = logging.getLogger(__name__)

#: How many damaged places the text names.
_NAMED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    help_text = "ROOT/iter_0000200, ROOT@newest, or all below ROOT"
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT|ROOT", help=help_text)
    parser.add_argument("--key", metavar="PATTERN", help="only keys that match, such as 'model.*', or are below it")
    parser.add_argument("--resume", action="store_true", help="continue a verification that was cut off")


def run(parsed: argparse.Namespace, output: Output) -> int | None:
    """Verify.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no key matches
        CheckpointError: it cannot be verified here
    """
    chosen: dict[str, Storage] = {}
    for argument in parsed.checkpoints:
        checkpoint = find_checkpoint(argument, parsed.options)
        paths = [checkpoint.path]
        if checkpoint.root is not None and checkpoint.whole_root:  # all that are or should be checkpoints
            paths = [path for _, path in sorted(checkpoint.root.paths.items())]
        chosen |= dict.fromkeys(paths, checkpoint.fs)

    results, intact = list[dict[str, Any]](), set[Hashable]()
    users = CheckpointsOfFiles((fs, path) for path, fs in chosen.items())
    for path, fs in chosen.items():
        try:
            results.append(_verify(fs, path, parsed.key, parsed.resume, intact, users))
        except CheckpointError as error:
            if len(chosen) == 1:
                raise
            results.append({"path": path, "state": "unknown", "error": str(error), "damaged": []})
        output.show(_lines(results[-1], output))
    output.result({"checkpoints": results})
    if any(result["damaged"] for result in results):
        return NO
    return FAILED if any(result["state"] in ("unknown", "part") for result in results) else None


def _verify(
    fs: Storage, path: str, pattern: str | None, resume: bool, intact: set[Hashable], users: CheckpointsOfFiles
) -> dict[str, Any]:
    """Verify one checkpoint.

    Args:
        fs: its storage
        path: its path
        pattern: of the keys to verify; None: all
        resume: whether to leave out what an earlier command found intact
        intact: what was found intact in files that checkpoints share, which is left out and added to
        users: says which checkpoints damaged files are part of

    Returns:
        What was found, as values of JSON.
    """
    started = time.perf_counter()
    inspection = inspect(fs, path)
    items, lost, damages = inspection.items, inspection.lost, inspection.damages
    result: dict[str, Any] = {"path": path}
    if pattern is not None:
        keys_by_place = inspection.keys_by_place()
        keys = {*matching_keys([*dict.fromkeys(chain.from_iterable(keys_by_place.values()))], pattern, path)}
        chosen = {place for place, stored in keys_by_place.items() if not keys.isdisjoint(stored)}
        others = {item.file for item in [*items, *lost]}
        items, lost = ([item for item in group if (item.file, item.offset) in chosen] for group in (items, lost))
        others -= {item.file for item in lost}
        damages = [damage for damage in damages if damage.file not in others]
        result["keys"] = len(keys)
    verified = VerifiedItems(fs, inspection, resume=resume)
    shared = SharedFiles(fs, inspection.folder, inspection.sizes)
    left = [item for item in items if item not in verified]
    unread = [item for item in left if shared.bytes_of(item) not in intact]

    def done(item: StoredRange) -> None:
        verified.add(item)
        if (same := shared.bytes_of(item)) is not None:
            intact.add(same)

    try:
        verify_items(
            inspection.storage,
            inspection.folder,
            unread,
            damages.append,
            done=done,
            progress=progress_bar,
            shared=False,
        )
    except BaseException:
        verified.save()
        logger.warning("not complete; to continue, add --resume to the command")
        raise
    verified.delete()
    nbytes, nbytes_left = (sum(item.length for item in set(group)) for group in (items, left))
    result |= {
        "state": _state(inspection, damages),
        "bytes": nbytes,
        "items": len(items),
        "files": len(inspection.sizes),
        "file_bytes": sum(inspection.sizes.values()),
        "resumed_bytes": nbytes - nbytes_left,
        "shared_bytes": nbytes_left - sum(item.length for item in set(unread)),
        "seconds": round(time.perf_counter() - started, 3),
        "damaged": [],
    }
    if inspection.elsewhere:
        result["elsewhere"] = inspection.elsewhere
    if damages:
        keys_by_place = inspection.keys_by_place()
        result["damaged"] = [_described(damage, lost, keys_by_place) for damage in damages]
        for each in result["damaged"]:
            file = shared.get(each["file"])
            each["also_in"] = [] if file is None else users.others(file, path)
    return result


def _state(inspection: Inspection, damages: Sequence[Damage]) -> str:
    if damages:
        return "damaged"
    if inspection.elsewhere:
        return "part"
    return "verified" if inspection.verifiable else "unverified"


def _described(
    damage: Damage, lost: list[StoredRange], keys_by_place: dict[tuple[str, int], list[str]]
) -> dict[str, Any]:
    """A damage as values of JSON, with the keys whose bytes are damaged."""
    items = [item for item in lost if item.file == damage.file] if damage.item is None else [damage.item]
    return {
        "file": damage.file,
        "keys": [key for item in items for key in keys_by_place.get((item.file, item.offset), ())],
        "offset": None if damage.item is None else damage.item.offset,
        "length": None if damage.item is None else damage.item.length,
        "unreadable": isinstance(damage.error, CheckpointUnreadableError),
        "error": str(damage.error),
    }


def _lines(result: dict[str, Any], output: Output) -> Iterator[str]:
    """The text for one checkpoint."""
    path, damaged = shown(result["path"]), result["damaged"]
    if "error" in result:
        yield f"{path}: {output.style('not verified', 'yellow')}: {result['error']}"
        return
    files = counted(result["files"], "file")
    data = f"{amount(result['file_bytes'])} in {counted(result['items'], 'item')} of {files}"
    if "keys" in result:
        data = f"{counted(result['keys'], 'key')}, {amount(result['bytes'])}"
    if not damaged and result["state"] == "verified":
        earlier = f", {amount(result['resumed_bytes'])} of it before" if result["resumed_bytes"] else ""
        read = f", {amount(result['shared_bytes'])} of it shared and read above" if result["shared_bytes"] else ""
        yield f"{path}: {output.style('verified', 'green')}, {data} in {result['seconds']:.2f} s{earlier}{read}"
    elif not damaged and result["state"] == "part":
        part, hosts = output.style("a part", "yellow"), ", ".join(result["elsewhere"])
        yield f"{path}: {part}: what is here is whole ({data}); the other files are on {hosts}"
    elif not damaged:
        yield (
            f"{path}: {output.style('unverified: no checksums', 'yellow')}; sizes and structure are right ({files}, "
            f"{amount(result['file_bytes'])})"
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
        shared = {each["file"]: each["also_in"] for each in damaged if each["also_in"]}
        for file, others in shared.items():
            beside = os.path.dirname(result["path"])
            names = [os.path.basename(other) if os.path.dirname(other) == beside else shown(other) for other in others]
            yield f"  {file} is damaged; the same file is part of {', '.join(names)}"
