"""What a run of the tests has tried: tests record it with `record_property`, and `.ci/soak` adds it up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

#: The fixture `record_property` of pytest: a name such as "kills", and how many there were.
Record = Callable[[str, object], None]


def summary(*reports: Path) -> dict[str, Any]:
    """Add up the properties that JUnit reports of pytest hold, and count the tests that failed.

    Args:
        *reports: a test in a later report was run again, and replaces the same test in an earlier one
    """
    cases: dict[tuple[str | None, str | None], ElementTree.Element] = {}
    again, seconds = 0, 0.0
    for report in reports:
        root = ElementTree.parse(report).getroot()
        seconds += sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
        for case in root.iter("testcase"):
            name = case.get("classname"), case.get("name")
            again += name in cases
            cases[name] = case
    tried: Counter[str] = Counter()
    for each in (each for case in cases.values() for each in case.iter("property")):
        value = str(each.get("value"))
        if value.isdigit():  # others are figures, in words
            tried[str(each.get("name"))] += int(value)
    kinds = Counter(child.tag for case in cases.values() for child in case)
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tests": len(cases) - kinds["skipped"],
        "tests that failed": kinds["failure"] + kinds["error"],
        "tests run again": again,
        "minutes": round(seconds / 60),
        "tried": dict(sorted(tried.items())),
    }


if __name__ == "__main__":
    print(json.dumps(summary(*map(Path, sys.argv[1:])), indent=2))
