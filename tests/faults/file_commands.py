"""What the forked children of `test_file_commands` run: a command of `ckpt` under a failpoint."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence

from ckpt_component.cli.app import main
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG, FileStorage


def ckpt(arguments: Sequence[str], failpoint: str, log: str, across: bool) -> int | None:
    """Run a command; `across`: as if all folders were on other file systems. Returns the exit code."""
    os.environ |= {FAILPOINT: failpoint, FAILPOINT_LOG: log} if failpoint else {}
    if across:
        genuine = FileStorage.rename_new

        def rename_new(self: FileStorage, source: str, target: str) -> bool:
            if os.path.dirname(source) != os.path.dirname(target):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            return genuine(self, source, target)

        FileStorage.rename_new = rename_new  # type: ignore[method-assign]
    try:
        main(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        return 70
    return 0
