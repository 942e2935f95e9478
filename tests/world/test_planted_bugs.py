"""The test of the tests: bugs that projects of this kind had, and ours, are planted one by one, and each is found.

A bug is a replacement in a copy of the package, in which the world looks for a life with something wrong. Those marked
`ours` are from this repository's log; the others are from the issues of torch, Megatron, NVRx, Orbax, Lightning and
torchtitan that `docs/reliability.md` names, carried over to our code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
#: In how many lives each is found; most in a few, and none in more than 500.
LIVES = 700
#: A bug may let a life hang.
DEADLINE_SECONDS = 1500


@dataclass(frozen=True)
class Bug:
    """A bug: in a file, a text and what stands there instead; in which lives it is found, and by which troubles.

    Attributes:
        lives: storage, hosts and script
        kinds: of the troubles, as of `find`; none: those that find most
    """

    name: str
    file: str
    text: str
    instead: str
    lives: str
    kinds: tuple[str, ...] = ()


BUGS = [
    Bug(
        "data_is_not_synced",
        "core/writing/write_job.py",
        "list(pool.map(fs.sync, descriptors.values()))",
        "pass",
        "disk a train",
    ),
    Bug(
        "names_of_data_are_not_synced",
        "core/commit/commit.py",
        "    storage.sync_folder(staging)\n",
        "",
        "disk a train",
    ),
    Bug(
        "the_commit_is_reported_before_it_is_durable",
        "core/commit/protocols.py",
        "            self.storage.sync_folder(os.path.dirname(target))\n",
        "            pass\n",
        "disk a by_path",
    ),
    Bug(
        "the_manifest_is_not_synced",
        "core/storage/storage.py",
        "            self.sync(fd)\n",
        "",
        "disk a train",
    ),
    Bug(
        "the_name_of_the_manifest_is_not_synced",
        "core/commit/protocols.py",
        "            storage.sync_folder(target)\n        except OSError:\n            # The save",
        "            pass\n        except OSError:\n            # The save",
        "mounted a train",
    ),
    Bug(
        "a_lost_answer_counts_as_a_failure",
        "core/commit/protocols.py",
        "            self._confirm(attempt, manifest, error, timeout)\n",
        "            raise\n",
        "mounted a train",
    ),
    Bug(
        "one_too_many_is_deleted",
        "core/commit/cleanup.py",
        "        old = sorted(committed)[: -max(self.last, 1)]\n",
        "        old = sorted(committed)[: -max(self.last - 1, 1)]\n",
        "disk a goes_on",
    ),
    Bug(
        "one_too_many_is_kept",
        "core/commit/cleanup.py",
        "        old = sorted(committed)[: -max(self.last, 1)]\n",
        "        old = sorted(committed)[: -max(self.last, 1) - 1]\n",
        "disk a train",
    ),
    Bug(
        "the_best_is_deleted",
        "core/commit/cleanup.py",
        "[step for step in old if step not in best and",
        "[step for step in old if",
        "disk a best",
    ),
    Bug(
        "the_old_one_is_deleted_before_the_commit",
        "saving/save_queue.py",
        "        try:\n            made = self.retries.run(",
        "        if self._ranks.is_leader and request.step:\n"
        "            from ..core.commit.cleanup import discard\n"
        "            import os\n"
        "            for name in request.storage.names(os.path.dirname(request.path)):\n"
        "                if name.startswith('iter_'):\n"
        "                    discard(request.storage, os.path.join(os.path.dirname(request.path), name))\n"
        "        try:\n            made = self.retries.run(",
        "disk a train",
    ),
    Bug(
        "a_checkpoint_is_deleted_under_its_name",
        "core/commit/protocols.py",
        "        self.storage.remove_tree(self._moved(path, trash_path(path, self.storage.outside)))\n",
        "        self.storage.remove_tree(path)\n",
        "disk a delete",
    ),
    Bug(
        "what_is_not_finished_stays",
        "core/commit/cleanup.py",
        "            return not (alive or self._is_kept(name) or signs.is_young(path))\n",
        "            return False\n",
        "disk a train",
    ),
    Bug(
        "the_pointer_is_written_in_place",
        "core/storage/files.py",
        "        if not self.atomic_rename:\n            if self.size",
        "        if True:\n            if self.size",
        "disk a train",
    ),
    Bug(
        "a_copy_is_not_synced",
        "core/commit/copying.py",
        "            storage.sync(writing)\n",
        "",
        "disk a copy",
    ),
    Bug(
        "what_is_damaged_is_loaded",
        "formats/ranges.py",
        "        combines = checksum is not None and",
        "        self._checksum = checksum = None\n        combines = checksum is not None and",
        "disk a damaged",
    ),
    Bug(
        "what_is_damaged_stays_under_its_name",
        "core/commit/protocols.py",
        "        return self._moved(path, quarantine_path(path, self.storage.outside))\n",
        "        return path\n",
        "disk a damaged",
    ),
    Bug(
        "rank_0_does_not_wait_for_the_last_vote",
        "core/coordination/question.py",
        '        if self.has_all() or self.count("failed"):\n',
        '        if self.count("count") >= self.store.world_size - 1 or self.count("failed"):\n',
        "disk ab train",
    ),
    Bug(
        "a_dead_rank_is_no_reason_to_fail",
        "core/coordination/question.py",
        "        if failures or lost:\n",
        "        if failures:\n",
        "disk ab train",
    ),
    Bug(
        "a_rank_that_could_not_write_votes_for_the_save",
        "core/coordination/store_coordinator.py",
        "        self.cast(tag, result, failure)\n",
        '        self.cast(tag, result or {"rank": self.rank, "files": []})\n',
        "disk ab train",
    ),
    Bug(
        "a_run_that_was_replaced_commits",
        "core/commit/commit.py",
        "        check_owner(storage, os.path.dirname(attempt.target), attempt.owner)\n",
        "        pass\n",
        "disk ab train",
    ),
    Bug(
        "a_rank_without_a_heartbeat_is_not_dead",
        "core/coordination/heartbeat.py",
        "elif beat is not None and now - since >= self._timeout:\n                self._dead.add(rank)",
        "elif False:\n                self._dead.add(rank)",
        "disk ab train",
    ),
    Bug(
        "a_connection_that_broke_stays_broken",  # ours
        "core/coordination/connection.py",
        "                    opens = _can_be_opened(store[0], outside)\n",
        "                    opens = False\n",
        "disk ab train",
    ),
    Bug(
        "a_commit_that_is_not_announced_is_reported_as_failed",  # ours
        "core/coordination/store_coordinator.py",
        "            self._post_answer(question, result=result)\n",
        "            question.answer(result=result)\n",
        "disk ab train",
        ("store_stopped:save",),
    ),
    Bug(
        "a_vote_that_is_not_counted_is_waited_for",  # ours
        "core/coordination/store_coordinator.py",
        "            against(question.store)\n",
        "            raise\n",
        "disk ab goes_on",
        ("message_lost:save",),
    ),
    Bug(
        "a_vote_whose_rank_died_before_it_was_counted_is_waited_for",  # ours
        "core/coordination/question.py",
        "        if not ranks:\n",
        "        if False:\n",
        "disk ab train",
    ),
    Bug(
        "what_a_dead_run_left_stays",
        "core/commit/fencing.py",
        "                self._clean_up()\n",
        "                pass\n",
        "disk ab train",
    ),
    Bug(
        "a_run_that_was_replaced_commits_to_a_bucket",
        "core/commit/commit.py",
        "        check_owner(storage, os.path.dirname(attempt.target), attempt.owner)\n",
        "        pass\n",
        "bucket ab train",
    ),
    Bug(
        "a_folder_that_listings_do_not_know_yet_is_taken_for_a_deleted_one",
        "saving/attempts.py",
        "            attempt.protocol.join(attempt, self._timeouts.visible)\n",
        "            attempt.protocol.join(attempt, 0.0)\n",
        "bucket ab train",
        ("stale:save",),
    ),
    Bug(
        "a_manifest_replaces_that_of_another_run",
        "core/storage/bucket.py",
        '                self._put(path, data, "create")\n',
        "                self._put(path, data)\n",
        "bucket ab train",
    ),
    Bug(
        "the_copies_of_a_host_are_on_the_host_itself",
        "core/coordination/coordinator.py",
        "        for peer in self.peers_of(name, given, replicas):\n",
        "        for peer in [name]:\n",
        "disk ab peers",
        ("lose_host",),
    ),
    Bug(
        "a_keeper_that_has_no_job_is_waited_for",  # ours
        "hosts/keep.py",
        'if client.rank in ranks and client.about().get("writing"):',
        "if client.rank in ranks and client.about():",
        "disk aaa memory",
        ("kill",),
    ),
    Bug(
        "a_run_that_dies_in_its_first_save_hides_an_earlier_snapshot",  # ours
        "hosts/snapshot_source.py",
        "        for token in lineage:\n            kept",
        "        for token in lineage[:1]:\n            kept",
        "disk aa memory",
        ("kill",),
    ),
    Bug(
        "what_is_damaged_on_its_way_between_ranks_is_loaded",
        "formats/ranges.py",
        "        combines = checksum is not None and",
        "        self._checksum = checksum = None\n        combines = checksum is not None and",
        "disk ab train",
        ("flip_link",),
    ),
    Bug(
        "a_replica_is_kept_without_comparison",
        "hosts/peer_client.py",
        " if value != right]\n",
        " if False]\n",
        "disk ab peers",
        ("flip_link:save+lose_host:save",),
    ),
    Bug(
        "the_owner_is_read_before_the_last_work_on_an_attempt",
        "core/commit/commit.py",
        "    manifest = encode_manifest(content)\n",
        "    if attempt.owner:\n"
        "        check_owner(storage, os.path.dirname(attempt.target), attempt.owner)\n"
        "        attempt = __import__('dataclasses').replace(attempt, owner='')\n"
        "    manifest = encode_manifest(content)\n",
        "disk ab train",
        ("second_run",),
    ),
    Bug(
        "who_follows_a_decision_counts_as_one_who_votes",  # ours: two servers wait for each other
        "hosts/keep.py",
        "            undecided.finish(client.still_writing)\n        client.writing.discard(self)\n",
        "            undecided.finish()\n"
        "        client.writing.discard(self)\n"
        "        undecided.lock.close = lambda: None\n",
        "disk aaa memory",
        ("stop_and_kill:save",),
    ),
    Bug(
        "a_delta_is_applied_on_another_base",
        "publishing/delta.py",
        "    if found != checksum:\n",
        "    if False:\n",
        "disk a weights",
        ("damage_received",),
    ),
    Bug(
        "a_delta_is_made_against_a_mirror_that_is_damaged",
        "publishing/mirror.py",
        "                    is_right &= known.get(tensor.name) == encoded.base\n",
        "",
        "disk a weights",
        ("damage_mirror",),
    ),
    Bug(
        "a_publisher_that_was_replaced_commits",
        "publishing/publisher.py",
        "owned_token(new_token(storage.outside)), self._run)\n",
        "owned_token(new_token(storage.outside)), '')\n",
        "disk a weights",
        ("replace_publisher",),
    ),
]
PROGRAM = f"""
import faulthandler, sys
from world.find import find
faulthandler.dump_traceback_later({DEADLINE_SECONDS}, exit=True)
sys.exit(find(*sys.argv[1:], lives={LIVES}))
"""


def looked(package: Path, bug: Bug) -> subprocess.CompletedProcess[str]:
    """Look for a life with something wrong in a copy of the package."""
    path = os.pathsep.join([str(package), str(TESTS), str(TESTS / "support"), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, bug.lives, *bug.kinds],
        env={**os.environ, "PYTHONPATH": path},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS + 60,
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_has_its_place(bug: Bug) -> None:
    assert (PACKAGE / bug.file).read_text().count(bug.text) == 1, "the place of the bug has changed"


@pytest.mark.soak
@pytest.mark.timeout(DEADLINE_SECONDS + 120)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    copy = tmp_path / "ckpt_component"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conf", "recipes"):
        if not (copy / name).exists():
            (tmp_path / name).symlink_to(PACKAGE.parent / name)
    text = (copy / bug.file).read_text()
    (copy / bug.file).write_text(text.replace(bug.text, bug.instead, 1))
    done = looked(tmp_path, bug)
    told = f"{done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    assert done.returncode == 1, told
    assert "violation" in done.stdout, told
