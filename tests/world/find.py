"""Look for a life with something wrong: `python -m world.find "disk a train" kill answer_lost`, in the folder tests."""

from __future__ import annotations

import itertools
import logging
import random
import sys

from world.cases import every_place, wrong_in
from world.trouble import Trouble
from world.world import Case, World

#: Troubles that find most, the quickest first.
USUAL = ("power_cut", "answer_lost", "kill", "fails", "second_run", "message_lost", "answer_of_store_lost", "stop")


def find(world: str, *kinds: str, lives: int | None = None) -> int:
    """Print the first that is found.

    Args:
        world: storage, hosts and script of the lives
        kinds: of the troubles, and perhaps the call: `message_lost:save`, or two that come one after the other:
            `flip_link:save+lose_host:save`; none: the usual ones
        lives: how many at most; None: all that there are

    Returns:
        1; 0 if there is none.
    """
    logging.disable(logging.CRITICAL)
    storage, hosts, script = world.split()
    if wrong := World(Case(storage, hosts, script)).live():
        print("violation without a trouble:", wrong[0])
        return 1
    chosen, found = random.Random(1), list[list[tuple[Trouble, ...]]]()
    for text in kinds or USUAL:
        places = list[list[Trouble]]()
        for kind, _, call in (each.partition(":") for each in text.split("+")):
            everywhere = every_place(kind, storage, hosts, script)
            places.append([place for place in everywhere if call in ("", place.call)])
        for each in places:
            chosen.shuffle(each)
        found.append([*zip(*places, strict=False)])
    # By turns.
    turns = filter(None, itertools.chain(*itertools.zip_longest(*found)))
    for number, troubles in enumerate(itertools.islice(turns, lives)):
        if wrong := wrong_in([Case(storage, hosts, script, troubles, number)]):
            print("violation:", wrong[0])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(find(*sys.argv[1:]))
