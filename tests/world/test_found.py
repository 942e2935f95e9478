"""Lives in which something was wrong once."""

from __future__ import annotations

import pytest
from world.cases import wrong_in
from world.world import Case

FOUND = [
    # The first rank waited 20 s to see a commit in the memory of its keeper, which had ended.
    "disk aaa memory 99 kill:save:2525:-1",
    # A rank died before it had made the group to read in, where the others waited for it for `timeouts.stage`.
    "disk abc shared 264 kill:restore:264:0",
    # A keeper that could not remove its socket ended with a traceback.
    "disk aa memory 3 open_to_others:restore:30:-1",
    # A publisher that ended as it began a version left an empty folder, and a gap in the numbers.
    "mounted a weights 1 kill:publish:171:-1",
    # A version was copied from a mirror that was damaged after the weights were written there.
    "disk a weights 6 damage_mirror:publish:495:-1",
]


@pytest.mark.parametrize("text", FOUND)
def test_what_was_wrong_once_is_not(text: str) -> None:
    assert not wrong_in([Case.of(text)])
