"""`ckpt verify CKPT|ROOT...`: compare all bytes with their checksums."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ..core.commit.names import MANIFEST
from ..core.progress import progress_bar
from ..core.storage.locate import is_url
from ..core.storage.space import amount
from ..core.storage.storage import Storage, StoredFile
from ..errors import CheckpointError, CheckpointUnreadableError, first_keys
from ..formats.checkpoints import Root, find_checkpoint, matching_keys
from ..formats.rank_index import StoredRange
from ..formats.verification import Damage, Inspection, inspect, verify_items
from .app import FAILED, NO
from .output import Output, counted
from .roots import files_in, shown, usage_of


class SharedFiles:
    """The files of a checkpoint that other paths lead to as well. In a bucket there are none.

    Args:
        fs: the storage
        folder: folder of the files
        names: names of the checkpoint's files
    """

    def __init__(self, fs: Storage, folder: str, names: Iterable[str]) -> None:
        self._files: dict[str, tuple[StoredFile, float]] = {}
        for name in () if is_url(folder) else names:
            file = fs.file_at(os.path.join(folder, name))
            if file is not None and file.paths > 1:
                with suppress(FileNotFoundError):  # deleted just now
                    self._files[name] = file, fs.changed(file.path)

    @property
    def nbytes(self) -> int:
        """Bytes that deleting the checkpoint would not free."""
        return usage_of(file for file, _ in self._files.values()).shared

    def get(self, name: str) -> StoredFile | None:
        """The file of this name, if it is shared."""
        return self._files[name][0] if name in self._files else None

    def bytes_of(self, item: StoredRange) -> Hashable | None:
        """Equal for the same bytes of the same file with the same checksum; None: the file is not shared."""
        if item.file not in self._files:
            return None
        file, changed = self._files[item.file]
        return file.identity, file.size, changed, item.offset, item.length, item.checksum_kind, item.checksum


class CheckpointsOfFiles:
    """Which checkpoints files are part of. They are listed when that is first needed.

    Args:
        checkpoints: storages and paths; all others beside them in their folders are looked at too
    """

    def __init__(self, checkpoints: Iterable[tuple[Storage, str]]) -> None:
        self._given = [*checkpoints]

    def others(self, file: StoredFile, path: str) -> list[str]:
        """The paths of the checkpoints that a file is part of, besides the one at a path, in order."""
        return sorted(self._paths.get(file.identity, set()) - {path})

    @cached_property
    def _paths(self) -> Mapping[Hashable, set[str]]:
        given = {path: fs for fs, path in self._given if not is_url(path)}
        beside = {os.path.dirname(path): fs for path, fs in given.items()}
        for folder, fs in beside.items():
            given |= dict.fromkeys(Root(fs, folder).paths.values(), fs)
        found = defaultdict[Hashable, set[str]](set)
        for path, fs in given.items():
            for file in files_in(fs, path):
                found[file.identity].add(path)
        return found


logger = logging.getLogger(__name__)

_SAVE_SECONDS = 5.0


class VerifiedItems:
    """The intact items of a checkpoint, in a file of the cache folder. Thread-safe.

    They count only as long as no file of the checkpoint has changed.

    Args:
        fs: the storage of the checkpoint
        inspection: the checkpoint, whose items have not been read yet
        resume: start with what the file says; else with nothing
    """

    def __init__(self, fs: Storage, inspection: Inspection, *, resume: bool) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        name = hashlib.sha256(os.fsencode(inspection.path)).hexdigest()[:16]
        self._path = cache / "ckpt_component" / f"verify-{name}.jsonl"
        self._checkpoint = inspection.path
        #: The file's first line.
        self._signature = f"{_signature(fs, inspection)}\n"
        self._known = self._read() if resume else set()
        self._fresh: list[StoredRange] = []
        self._lock = threading.RLock()
        self._saved_at = time.monotonic()

    def __contains__(self, item: StoredRange) -> bool:
        return (item.file, item.offset, item.length) in self._known

    def add(self, item: StoredRange) -> None:
        """An item is intact; the file is written every few seconds."""
        with self._lock:
            self._fresh.append(item)
            if time.monotonic() - self._saved_at > _SAVE_SECONDS:
                self.save()

    def save(self) -> None:
        """Write what is new."""
        with self._lock:
            self._saved_at = time.monotonic()
            lines = [f"{json.dumps([item.file, item.offset, item.length])}\n" for item in self._fresh]
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                if not self._known:
                    self._path.write_text(self._signature)
                with self._path.open("a") as file:
                    file.writelines(lines)
            except OSError as error:
                logger.warning("%s cannot be written (%s); once cut off, all is verified again", self._path, error)
                self._saved_at = math.inf  # not again
            self._known |= {(item.file, item.offset, item.length) for item in self._fresh}
            self._fresh.clear()

    def delete(self) -> None:
        """The verification is complete."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # such as in a home folder of another user, where there is none of ours
            logger.info("%s cannot be deleted: %s", self._path, error)

    def _read(self) -> set[tuple[str, int, int]]:
        try:
            with self._path.open() as lines:
                if next(lines, "") == self._signature:
                    return {tuple(json.loads(line)) for line in lines if line.endswith("]\n")}
            logger.warning("%s has changed since it was verified; verifying all of it", self._checkpoint)
        except FileNotFoundError:
            logger.info("no verification of %s was cut off; verifying all of it", self._checkpoint)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s cannot be used (%s); verifying all", self._path, error)
        return set()


def _signature(fs: Storage, inspection: Inspection) -> str:
    """What changes when a file of a checkpoint does."""
    files = [os.path.join(inspection.path, MANIFEST)]
    files += [os.path.join(inspection.folder, name) for name in sorted(inspection.sizes)]
    status = [(fs.size(file), fs.changed(file)) for file in files if fs.exists(file)]
    return hashlib.sha256(repr((files, status)).encode()).hexdigest()


#: How many damaged places the text names.
_NAMED = 20


def verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    help_text = "ROOT/iter_0000200, ROOT@newest, or all below ROOT"
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT|ROOT", help=help_text)
    parser.add_argument("--key", metavar="PATTERN", help="only keys that match, such as 'model.*', or are below it")
    parser.add_argument("--resume", action="store_true", help="continue a verification that was cut off")


def run_verify(parsed: argparse.Namespace, output: Output) -> int | None:
    """`ckpt verify CKPT|ROOT...`: compare all bytes with their checksums.

    Read checkpoints, or all of a folder, and compare every value with the checksums taken at the save; a file that
    several of them share is read once. Needs no torch. Of other programs' checkpoints it checks sizes and structure,
    and the CRCs in files of torch.save. Exit code 1: something is damaged; 2: only a part is here, and other hosts have
    the rest.

    example:
      ckpt verify checkpoints@200 --key 'model.*'

    What was verified is noted every few seconds in ~/.cache/ckpt_component.
    --resume skips it if no file of the checkpoint has changed since.
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
