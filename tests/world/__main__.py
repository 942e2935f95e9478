"""Live one life again: `python -m world "disk ab train 17 kill:save:20:-1"`, in the folder tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as pytest has it

from world.world import Case, World


def main() -> int:
    """Print what was wrong, and what calls have told the ranks."""
    world = World(Case.of(" ".join(sys.argv[1:])))
    wrong = world.live()
    for told in world.told:
        print(f"{told.since:9.2f} s  job {told.job} rank {told.rank}: {told.call} {told.step or ''}", end=" ")
        print(f"took {told.until - told.since:.2f} s", told.error or "")
    print("happened:", *world.happened)
    print("\n".join(wrong) or "nothing is wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
