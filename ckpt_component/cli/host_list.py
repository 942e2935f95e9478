"""The hosts of a job on the command line: how many, or their names as Slurm writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import CheckpointConfigError

#: More would be a mistake.
_MOST = 100_000
#: A name, whose numbers may be in brackets: `node[01-16,20]`.
_PART = re.compile(r"(\w[\w.-]*)?(?:\[([\d,-]+)\]([\w.-]*))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def host_names(text: str) -> tuple[str, ...]:
    """The names of `node1,node2`, `node[1-16]` or `"$SLURM_JOB_NODELIST"`; of a number, `host0`, `host1` and so on.

    Raises:
        CheckpointConfigError: it is neither; the text says what to type instead
    """
    text = text.strip()
    if text.isdecimal():
        if not 0 < int(text) <= _MOST:
            raise CheckpointConfigError(f"--hosts={text} must be from 1 to {_MOST}.")
        return tuple(f"host{number}" for number in range(int(text)))
    names = [name for part in re.split(r",(?![^\[]*\])", text) for name in _names(part.strip(), text)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CheckpointConfigError(f"--hosts={text} has {twice} twice; name each host once.")
    return tuple(names)


def _names(part: str, text: str) -> Iterator[str]:
    match = _PART.fullmatch(part)
    if match is None or not part:
        raise CheckpointConfigError(
            f"--hosts={text} is not a number of hosts, and not their names; type --hosts=8, --hosts=node1,node2 or "
            "--hosts=node[1-8]."
        )
    before, numbers, after = match[1] or "", match[2], match[3] or ""
    if numbers is None:
        yield part
        return
    for each in numbers.split(","):
        bounds = _RANGE.fullmatch(each)
        if bounds is None or not 0 <= int(bounds[2] or bounds[1]) - int(bounds[1]) < _MOST:
            raise CheckpointConfigError(
                f"--hosts={text}: [{each}] is not a range of numbers; type one such as node[1-8]."
            )
        for number in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1):
            yield f"{before}{number:0{len(bounds[1])}}{after}"
