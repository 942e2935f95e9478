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
    """Add up the properties that JUnit reports of pytest hold, and count the tests that failed."""
    tried: Counter[str] = Counter()
    tests = failed = skipped = 0
    seconds = 0.0
    for report in reports:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            tests += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
            seconds += float(suite.get("time", 0))
            for each in suite.iter("property"):
                value = str(each.get("value"))
                if value.isdigit():  # others are figures, in words
                    tried[str(each.get("name"))] += int(value)
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tests": tests - skipped,
        "tests that failed": failed,
        "minutes": round(seconds / 60),
        "tried": dict(sorted(tried.items())),
    }


if __name__ == "__main__":
    print(json.dumps(summary(*map(Path, sys.argv[1:])), indent=2))
