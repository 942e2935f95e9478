"""`ckpt memory`: what servers on this host have, as they and the folder on disk tell it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_manager
from ckpt_component.core.commit.fencing import read_owner
from ckpt_component.core.commit.names import OWNER
from ckpt_component.core.outside import Outside
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.space import amount
from ckpt_component.core.waits import Waits
from ckpt_component.hosts.server import SnapshotServer
from ckpt_component.hosts.stores import ImageRange, MemoryStore
from ckpt_component.hosts.wire import memory_root

Ckpt = Callable[..., Any]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with steps 1 to 3 on disk."""
    folder = tmp_path / "run"
    with build_manager("sync", ["checkpoint.keep.last=9", "checkpoint.save.at_end=false"], dir=folder) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.full((100,), float(step)), "epoch": step})
    return folder


class Kept:
    """The servers of a run of two ranks, of which the second has died, with the trainer, a minute ago.

    Attributes:
        servers: what each keeps
        outside: of the first one's process
        token: of the run
    """

    def __init__(self, root: Path, token: str | None = None) -> None:
        owner = read_owner(FileStorage(), str(root))
        assert owner is not None
        self.token = token or owner.token
        self.root = root
        self.clients = (MemoryStore(), MemoryStore())
        self.memory = memory_root(str(root), self.token)
        about = {"root": str(root), "world_size": 2, "since": time.time(), "lease": 500.0, "homes": {"7": "node7"}}
        alive, dead = {"alive": True, "gone": None}, {"alive": False, "gone": time.time() - 61}
        self.outside = Outside()
        self._servers = [
            SnapshotServer(self.clients[0], self.memory, 0, lambda: {**about, **alive}, outside=self.outside),
            SnapshotServer(self.clients[1], self.memory, 1, lambda: {**about, **dead}),
        ]

    def take(self, step: int) -> None:
        """Keep what is on disk: the data in the second server, the rest in the first."""
        for path in (self.root / f"iter_{step:07}").iterdir():
            client = self.clients[path.suffix == ".distcp"]
            client.put(f"{self.memory}/{path.parent.name}/{path.name}", path.read_bytes())

    def take_copies(self, step: int) -> None:
        """Keep copies in the first server of what rank 7, on another host, has of a step."""
        folder = f"{self.memory}/iter_{step:07}"
        self.clients[0].put_replica(7, folder, {f"{folder}/__7_0.distcp": ImageRange(b"bytes", modified=time.time())})

    def close_second(self) -> None:
        """The second server is on another host: nobody finds it here."""
        self._servers[1].close()

    def __enter__(self) -> Kept:
        for server in self._servers:
            server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()


@pytest.fixture
def kept(root: Path) -> Iterator[Kept]:
    with Kept(root) as kept:
        yield kept


def test_ls_has_a_row_for_each_server(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(2)
    ran = ckpt("memory", "ls", root)
    assert ran.code == 0
    name, facts, _, alive, dead = ran.out.splitlines()
    assert name == str(root) and "2 of 2 ranks" in facts and kept.token in facts
    assert alive.split()[:2] == ["0", "2"] and alive.endswith("alive")
    assert dead.split()[:2] == ["1", "2"] and dead.endswith("gone for 1 min; the snapshot stays for 8 min")
    rows = ckpt("memory", "ls", "--json").json["keepers"]
    assert rows == ckpt("memory", "ls", root, "--json").json["keepers"]
    assert [(row["rank"], row["steps"], row["alive"], row["pid"]) for row in rows] == [
        (0, [2], True, os.getpid()),
        (1, [2], False, os.getpid()),
    ]
    assert [row["bytes"] for row in rows] == [client.nbytes for client in kept.clients]


def test_the_list_of_a_folder_has_its_snapshots_too(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(2)
    ran = ckpt("ls", root)
    rows = [line.split(None, 1) for line in ran.out.splitlines()[1:5]]
    assert [row[0] for row in rows if row[1].endswith("in memory")] == ["2"]
    assert ran.out.splitlines()[-1].startswith("3 checkpoints, ") and ran.out.splitlines()[-1].endswith("; 1 in memory")
    (entry,) = [each for each in ckpt("ls", root, "--json").json["entries"] if each["state"] == "in memory"]
    assert (entry["step"], entry["path"], entry["ranks"]) == (2, None, 1)


def test_a_folder_is_listed_where_the_sockets_are_not_mine_alone(
    ckpt: Ckpt, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runtime").mkdir(mode=0o755)
    (tmp_path / "runtime").chmod(0o755)
    ran = ckpt("ls", root)
    assert (
        ran.code == 0 and "snapshots in memory are not listed" in caplog.text and "set CKPT_RUNTIME_DIR" in caplog.text
    )
    assert ran.out.splitlines()[-1].startswith("3 checkpoints, ")
    refused = ckpt("memory", "ls")
    assert refused.code == 2 and "set CKPT_RUNTIME_DIR to a folder of your own" in refused.err


def test_what_is_not_whole_is_no_snapshot(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(2)
    kept.clients[1].delete([file.path for file in kept.clients[1].listed("")])
    assert [row["steps"] for row in ckpt("memory", "ls", "--json").json["keepers"]] == [[], []]
    ran = ckpt("memory", "drop", root)
    assert ran.code == 2 and "has no whole snapshot" in ran.err and f"ckpt ls {root}" in ran.err


def test_show_reads_a_snapshot_as_a_checkpoint(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(1)
    kept.take(2)
    newest = ckpt("memory", "show", root, "--json").json
    assert newest["path"].startswith("host://") and newest["step"] == 2 and newest["verified"]
    on_disk = ckpt("show", f"{root}@2", "--json").json
    assert newest["entries"] == on_disk["entries"]
    assert ckpt("memory", "show", f"{root}@1", "--json").json["step"] == 1
    (entry,) = ckpt("memory", "show", f"{root}@1", "epoch", "--json").json["entries"]
    assert entry["value"] == "1"


def test_drop_says_what_the_next_start_resumes_from(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    for step in (1, 2, 3):
        kept.take(step)
    stays = ckpt("memory", "drop", root, "--step", "2")
    assert stays.code == 0 and "dropped step 2 of " in stays.out and "from step 3 (memory)" in stays.out
    assert [row["steps"] for row in ckpt("memory", "ls", "--json").json["keepers"]] == [[1, 3]] * 2
    gone = ckpt("memory", "drop", root)
    assert [line.split()[:3] for line in gone.out.splitlines()[:2]] == [
        ["dropped", "step", "1"],
        ["dropped", "step", "3"],
    ]
    assert f"from step 3 ({root / 'iter_0000003'})" in gone.out
    assert not any(client.listed("") for client in kept.clients)
    again = ckpt("memory", "drop", root)
    assert again.code == 2 and "has no whole snapshot" in again.err


def test_snapshots_of_a_run_that_was_replaced_are_not_resumed_from(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(1)
    with Kept(root, "aaaaaaaa-bbbbbbbb") as stale:
        owner = json.loads((root / OWNER).read_text())
        (root / OWNER).write_text(json.dumps(owner | {"earlier": [stale.token]}))
        stale.take(2)
        stale.take(3)
        assert ckpt("memory", "show", root, "--json").json["step"] == 1
        dropped = ckpt("memory", "drop", root, "--step", "3", "--json").json
        assert [each["token"] for each in dropped["dropped"]] == [stale.token]
        assert (dropped["resumes_from"], dropped["source"]) == (3, "disk")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["lst"], "ckpt memory has no action 'lst'; did you mean ckpt memory ls?"),
        (["drop"], "ckpt memory drop needs the run's folder; ckpt memory ls lists them."),
        (["show"], "ckpt memory show needs the run's folder; ckpt memory ls lists them."),
        (["ls", "{root}", "weight"], "ckpt memory ls does not take 'weight'; only show does."),
        (["show", "{root}", "--step", "2"], "ckpt memory show does not take --step; only drop does."),
        (["ls", "{root}s"], "This host has no snapshot of {root}s in memory; did you mean {root}?"),
        (["show", "{root}@2"], "The memory of this host has no snapshot of step 2 of {root}; it has 1, 3."),
        (["show", "{root}@new"], "'new' after the @ picks no snapshot; type {root}@120, or {root}."),
        (["drop", "{root}", "--step", "7"], "has no snapshot of step 7 of {root}; it has 1, 3."),
        (["ls", "--stp", "7"], "ckpt memory does not take '--stp'; did you mean --step?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_an_error_that_says_what_to_type(
    ckpt: Ckpt, root: Path, kept: Kept, arguments: list[str], text: str
) -> None:
    kept.take(1)
    kept.take(3)
    ran = ckpt("memory", *(each.format(root=root) for each in arguments))
    assert ran.code == 2 and text.format(root=root) in ran.err


def test_without_snapshots_ls_says_so_and_the_others_fail(ckpt: Ckpt, root: Path) -> None:
    assert ckpt("memory", "ls").out.startswith("no snapshots in memory on ")
    assert ckpt("memory", "ls", "--json").json["keepers"] == []
    assert "This host has no snapshot of" in ckpt("memory", "drop", root).err


def test_who_has_no_checkpoint_left_begins_anew(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(3)
    for path in [*root.glob("iter_*/*")]:
        path.unlink()
    for path in [*root.glob("iter_*")]:
        path.rmdir()
    ran = ckpt("memory", "drop", root)
    assert ran.code == 0 and "has no checkpoint: the next start begins anew" in ran.out


def test_ls_says_whose_copies_a_server_has(kept: Kept, ckpt: Ckpt) -> None:
    kept.take(1)
    own = kept.clients[0].nbytes
    kept.take_copies(1)
    first, second = ckpt("memory", "ls", "--json").json["keepers"]
    assert (first["copies"], second["copies"]) == ([{"rank": 7, "host": "node7", "steps": [1], "bytes": 5}], [])
    assert first["bytes"] == own + 5
    *_, title, row = map(str.split, ckpt("memory", "ls").out.splitlines())
    assert " ".join(title) == "copies of rank of host step size in the memory of"
    assert " ".join(row) == "7 node7 1 5 bytes rank 0's"
    assert amount(own) in ckpt("memory", "ls").out, "the size of a rank is its own"


def test_a_part_of_a_snapshot_on_several_hosts_is_listed_and_dropped(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(2)
    kept.close_second()
    ran = ckpt("memory", "ls")
    assert "1 of 2 ranks" in ran.out and "of step 2 only a part is here: the rest is on other hosts" in ran.out
    assert [row["steps"] for row in ckpt("memory", "ls", "--json").json["keepers"]] == [[2]]
    shown = ckpt("memory", "show", root)
    assert shown.code == 2 and "has only a part of step 2" in shown.err and "where a run finds it" in shown.err
    dropped = ckpt("memory", "drop", root)
    assert dropped.code == 0 and "type the same on each of them" in dropped.out and not kept.clients[0].listed("")


@pytest.mark.parametrize("spelling", ["link", "above/run", "run/../run/"])
def test_a_folder_is_found_however_it_is_spelled(ckpt: Ckpt, root: Path, kept: Kept, spelling: str) -> None:
    kept.take(3)
    (root.parent / "link").symlink_to(root.name)
    (root.parent / "above").symlink_to(".")
    named = f"{root.parent}/{spelling}"
    rows = ckpt("memory", "ls", named, "--json").json["keepers"]
    assert [(row["token"], row["steps"]) for row in rows] == [(kept.token, [3])] * 2
    assert "in memory" in ckpt("ls", named).out
    assert ckpt("memory", "show", f"{named}@3", "--json").json["step"] == 3
    dropped = ckpt("memory", "drop", named, "--json").json
    assert [each["step"] for each in dropped["dropped"]] == [3] and dropped["resumes_from"] == 3


def test_a_folder_that_was_moved_is_found_and_one_that_has_its_name_now_is_not(
    ckpt: Ckpt, root: Path, kept: Kept
) -> None:
    kept.take(1)
    moved = root.rename(root.parent / "moved")
    build_manager("sync", ["checkpoint.save.every_steps=1"], dir=root).close()
    with build_manager("sync", ["checkpoint.save.every_steps=1"], dir=root) as manager:
        manager.save(1, {"weight": torch.zeros(2)})
    assert str(moved) in ckpt("memory", "ls", moved).out.splitlines()
    assert ckpt("memory", "ls", moved, "--json").json["keepers"][0]["steps"] == [1]
    for action in ("ls", "drop"):
        assert "This host has no snapshot of" in ckpt("memory", action, root).err
    assert any(client.listed("") for client in kept.clients)


def test_a_copy_of_a_folder_has_nothing_in_memory(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    kept.take(1)
    copy = shutil.copytree(root, root.parent / "copy")
    for action in ("ls", "drop"):
        assert "This host has no snapshot of" in ckpt("memory", action, copy).err
    assert ckpt("memory", "drop", root, "--json").json["dropped"]


def test_ls_says_for_whom_a_server_waits(ckpt: Ckpt, root: Path, kept: Kept) -> None:
    seconds = [0.0]
    kept.outside.waits = Waits(lambda: seconds[0], time.time)
    with kept.outside.waits.on("rank 3, which has not voted", 60.0) as wait:
        seconds[0] = 12.0
        wait.look()
        (line,) = [line for line in ckpt("memory", "ls", root).out.splitlines() if "waited" in line]
        (first, second) = ckpt("memory", "ls", root, "--json").json["keepers"]
    assert (
        line.startswith("  rank 0's snapshot server has waited 12.")
        and "for rank 3, which has not voted, at most 4" in line
    )
    assert first["waits"][0]["for"] == "rank 3, which has not voted" and second["waits"] == []
    assert "waited" not in ckpt("memory", "ls", root).out
