"""A receiver is killed, or an operation fails, at every operation on files: the folder is at a version, whole."""

from __future__ import annotations

import errno
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence import Record
from forker import Forker
from published import Source, assert_at, leftovers, pull, random_state, version_at
from strides import first_of

from ckpt_component.core.storage.failpoint_fs import read_log

MANY = 400


@pytest.fixture(scope="module")
def receivers() -> Iterator[Forker]:
    server = Forker(["publishing.receiving"], adopts=True)
    yield server
    server.close()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Source:
    source = Source(tmp_path_factory.mktemp("published") / "to", shards=2)
    source.chain(1, 4)
    source.whole(5, random_state(5))
    return source


#: What the folder has, and what one process brings it to: from nothing; by deltas, in a copy, in the folder that was
#: switched out, and by a whole version.
WAYS = {"new": (None, [2]), "on": (2, [3, 4, 5])}


def run_through(way: str, action: str, stride: int, receivers: Forker, published: Source, tmp_path: Path) -> int:
    """Go through the operations of a receiver; returns how many faults there were."""
    has, numbers = WAYS[way]
    template = tmp_path / "template"
    template.mkdir()
    if has is not None:
        pull(published, str(template / "model"), has)
    for faults, count in enumerate(range(first_of(stride), MANY, stride)):
        place = tmp_path / str(count)
        shutil.copytree(template, place)
        folder, log = str(place / "model"), str(tmp_path / f"log{count}")
        words: dict[str, Any] = {"source": published.root, "folder": folder, "numbers": numbers, "log": log}
        pid = receivers.fork(
            "publishing.receiving:receive", failpoint=f"any:nth={count}:process=pull:action={action}", **words
        )
        ended, fired = receivers.wait(pid), read_log(f"{log}.fired")
        told = f"at {count}: {fired[0] if fired else 'the end'}, {ended.code} {ended.value}\n{ended.output}"
        assert ended.code == (-signal.SIGKILL if fired and action == "kill" else 0), told
        at = version_at(folder)
        assert at in ([has, *numbers] if fired else numbers[-1:]), told
        if at is not None:
            assert_at(published, folder, at)
        if ended.value:
            name = errno.ENOSPC if "ENOSPC" in action else errno.EIO
            assert "full" in ended.value or "fit" in ended.value or f"[Errno {name}]" in ended.value, told
        pull(published, folder, numbers[-1])
        assert_at(published, folder, numbers[-1])
        assert not leftovers(folder), told
        shutil.rmtree(place)
        if not fired:
            return faults
    raise AssertionError("an enumeration that does not end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "action", "stride"),
    [
        *((way, "kill", 7) for way in WAYS),
        *(
            pytest.param(way, action, 9, marks=pytest.mark.slow)
            for way in WAYS
            for action in ("raise:EIO", "raise:ENOSPC")
        ),
        *(
            pytest.param(way, action, 1, marks=[pytest.mark.soak, pytest.mark.timeout(400)])
            for way in WAYS
            for action in ("kill", "raise:EIO", "raise:ENOSPC")
        ),
    ],
)
def test_a_fault_at_an_operation(
    way: str,
    action: str,
    stride: int,
    receivers: Forker,
    published: Source,
    tmp_path: Path,
    record_property: Record,
) -> None:
    faults = run_through(way, action, stride, receivers, published, tmp_path)
    record_property("kills" if action == "kill" else "failing calls", faults)
    assert faults > 0


def test_all_is_durable_before_the_switch(receivers: Forker, published: Source, tmp_path: Path) -> None:
    folder, log = str(tmp_path / "model"), str(tmp_path / "log")
    words: dict[str, Any] = {"source": published.root, "folder": folder, "numbers": [2, 3, 4, 5], "log": log}
    assert receivers.run("publishing.receiving:receive", failpoint="any:nth=100000:action=kill", **words) == ""
    calls = [(each.operation, each.path) for each in read_log(log)]
    switches = [number for number, (operation, _) in enumerate(calls) if operation in ("rename_new", "exchange")]
    assert [calls[number] for number in switches] == [("rename_new", folder), *[("exchange", folder)] * 3]
    before = 0
    for switch in switches:
        made = calls[before:switch]
        changed = {path for operation, path in made if operation in ("create", "write", "copy")}
        assert any(path.endswith(".safetensors") for path in changed)
        for path in changed:
            last = max(n for n, call in enumerate(made) if call[0] in ("create", "write", "copy") and call[1] == path)
            later = [*made[last:]]
            named = path if ".ckpt-new." not in path else ""  # of the state, which is renamed to its name
            assert not named or ("sync", path) in later, path
        assert made[-1][0] == "sync_folder" and made[-1][1].endswith("/next")
        assert ("sync_folder", str(tmp_path)) in calls[switch : switch + 2]
        before = switch + 1


def test_a_disk_without_room_for_two_versions(receivers: Forker, tmp_path: Path) -> None:
    if receivers.unmountable:
        pytest.skip(receivers.unmountable)
    source, disk = Source(tmp_path / "to"), tmp_path / "disk"
    source.chain(1, 2, scale=100)
    disk.mkdir()
    size = sum(path.stat().st_size for path in source.path(1).iterdir())
    try:
        met = receivers.run(
            "publishing.receiving:receive_on_a_full_disk",
            source=source.root,
            disk=str(disk),
            sizes=[int(1.5 * size), 3 * size],
        )
    finally:
        receivers.here("faults.mounts:unmount", folder=str(disk))
    (said,) = met["said"]
    assert f"{source.path(2)} does not fit beside {disk}/model, where " in said and "on a larger disk" in said
    assert "stays at version 1" in said and "stays at version 1" in met["end"]
    assert (met["before"], met["left"], met["after"]) == (1, [], 2)
