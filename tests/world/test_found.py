"""Lives in which something was wrong once."""

from __future__ import annotations

import pytest
from world.cases import wrong_in
from world.world import Case

FOUND = [
    # The first rank waited 20 s to see a commit in the memory of its server, which had ended.
    "disk aaa memory 99 kill:save:2525:-1",
    # A rank died before it had made the group to read in, where the others waited for it for `timeouts.stage`.
    "disk abc shared 264 kill:restore:264:0",
    # A server that could not remove its socket ended with a traceback.
    "disk aa memory 3 open_to_others:restore:30:-1",
    # A publisher that ended as it began a version left an empty folder, and a gap in the numbers.
    "mounted a weights 1 kill:publish:171:-1",
    # The owner of the run could not be read, and the process of a version ended with a traceback.
    "bucket a weights 1 unreadable:publish:1:-1",
    # A version was copied from a mirror that was damaged after the weights were written there.
    "disk a weights 6 damage_mirror:publish:495:-1",
    # The process of a host's uploads was killed while the run waited for it, and was not started again.
    "disk ab uploads 2 kill:close:60:-1",
    # It ended for good, as its folder was deleted when it began.
    "disk ab uploads 2 folder_lost:restore:950:1",
    # It waited for a part of a newer step that no other host has, and sent nothing else.
    "disk ab uploads 2 folder_of_another_run:begin:500:-1",
    # A host had no manifest of a step, because of one bit on its way there, and never uploaded its part.
    "disk ab uploads 2 flip_link:save:350:-1",
    # All ranks waited 20 s for a folder that the first one had no room for.
    "disk ab uploads 1 stays_full:begin:1:-1",
]


@pytest.mark.parametrize("text", FOUND)
def test_what_was_wrong_once_is_not(text: str) -> None:
    assert not wrong_in([Case.of(text)])
