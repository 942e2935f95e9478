"""The numbers of the last soak, and their table in docs/reliability.md: `python docs/reliability.py` writes it.

`.ci/soak` runs the soak and writes the numbers to docs/reliability.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "reliability.md"
NUMBERS = REPOSITORY / "docs" / "reliability.json"

_MEANING = {
    "simulated power cuts": "the power goes at an operation of a simulated disk, with several possible disk states each",
    "simulated faults": "an operation of a simulated disk fails (once or from then on), is done but unanswered, or is cut short",
    "simulated requests": "a request to a simulated bucket fails, is done twice, loses its answer, or its client is killed",
    "schedules": "two to four simulated ranks save: messages get lost or late, ranks stop and die, storage fails",
    "lives": "one to four simulated ranks meet one trouble of processes, storages, messages or memory, or two",
    "recoveries": "two simulated ranks come back from memory, while one or two troubles meet each phase of saves and restores",
    "histories": "a random history of saves, faults, damage, restarts, rewinds, copies, deletions",
    "published versions": "weights are published and followed, while simulated publishers and receivers die, fail and are damaged",
    "published versions disturbed": "an operation of a simulated publisher is killed, cut, refused or left unanswered",
    "receivers disturbed": "the same at an operation of a simulated receiver, whose folder is looked at after each one",
    "kills": "`kill -9` of the trainer, the writer process, one rank or all, at a file operation or at a random moment",
    "recovery kills": "`kill -9` of a trainer, a keeper, both, torchrun or the session, while snapshots are kept in memory",
    "power cuts": "the power of a real ext4 is cut at a file operation",
    "real disks compared": "the state of a real ext4 after a power cut is checked against the simulated disk",
    "failing calls": "a file operation of a real run fails with EIO or ENOSPC, once or from then on",
    "damages": "a random bit flip, cut, swap or hole in a file of a checkpoint, then a load",
    "requests": "a request to a bucket is cut before or after its answer, repeated, or refused from then on",
}
_TABLE = re.compile(r"(?<=<!-- Written by docs/reliability.py. -->\n\n).*?\n(?=\n#|\Z)", re.S)


def page() -> str:
    """docs/reliability.md with the table as it is to be."""
    numbers = json.loads(NUMBERS.read_text())
    failed = numbers["tests that failed"]
    again = (
        f" ({numbers['tests run again']} run again{'' if failed else ', and passed'})"
        if numbers.get("tests run again")
        else ""
    )
    violations = f"{failed} test{'s' * (failed > 1)} failed" if failed else "no violation"
    lines = [
        f"{numbers['date']}, commit {numbers['commit']}, {numbers['tests']} tests{again}, {numbers['minutes']} minutes on two cores: "
        f"**{violations}**.",
        "",
        "| tried | how often |",
        "|---|---|",
        *(f"| {text} | {numbers['tried'][name]:,} |" for name, text in _MEANING.items() if name in numbers["tried"]),
    ]
    return _TABLE.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
