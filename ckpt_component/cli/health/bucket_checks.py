"""Checks of a bucket: each does there what a save does, under a name that is removed; its errors in words."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping

from ...core.commit.names import TRIAL_PREFIX
from ...core.storage.locate import storage_at
from ...core.storage.new_names import new_token
from ...core.storage.space import amount
from .finding import FAILS, OK, Finding

#: Size of the object that is written and read back.
_TRIED_BYTES = 32 << 20
#: What to do about errors of a bucket.
_FIXES = {
    errno.EACCES: "give credentials that may write there, in the environment (AWS_*, GOOGLE_*, AZURE_*) or by -o",
    errno.ENOENT: "create the bucket, or correct its name",
    errno.EINVAL: "correct the name",
}
_UNREACHABLE = "correct the endpoint (-o endpoint=URL, and -o allow_http=true without TLS), or the network"


def in_words(error: OSError) -> tuple[str, str]:
    """The answer of a bucket, without the request, and how to fix the cause."""
    text, code = str(error.strerror or error), error.errno or 0
    if "token request" in text:  # Azure and Google look for credentials elsewhere before they are asked
        code = errno.EACCES
    return text.rpartition(" - ")[2], _FIXES.get(code, _UNREACHABLE)


def check_bucket(root: str, options: Mapping[str, str]) -> Iterator[Finding]:
    """Check a bucket.

    Args:
        root: the URL of the checkpoints
        options: `checkpoint.storage.options`

    Raises:
        CheckpointConfigError: the package of the scheme is not installed, or an option is wrong
    """
    fs, trial = storage_at(root, options=options), os.path.join(root, f"{TRIAL_PREFIX}{new_token()}")
    what = "access"
    try:
        started = time.perf_counter()
        fs.names(root)
        took = 1e3 * (time.perf_counter() - started)
        yield Finding(what, OK, f"{root} can be listed, in {took:.0f} ms")
        what, started = "conditional put", time.perf_counter()
        fs.try_folder(root, os.path.basename(trial))
        took = 1e3 * (time.perf_counter() - started)
        yield Finding(what, OK, f"a name is given only once, so that one run commits a step; {took:.0f} ms")
        what = "rates"
        started, data = time.perf_counter(), os.urandom(1 << 20) * (_TRIED_BYTES >> 20)
        try:
            fs.write_new(trial, data)
            wrote, started = time.perf_counter() - started, time.perf_counter()
            same = fs.read(trial, _TRIED_BYTES) == data
        finally:
            if fs.size(trial) is not None:
                fs.unlink(trial)
        if not same:
            yield Finding(what, FAILS, "other bytes were read than were written", "use another store")
            return
        rates = _TRIED_BYTES / 1e6 / wrote, _TRIED_BYTES / 1e6 / (time.perf_counter() - started)
        text = f"{amount(_TRIED_BYTES)} at {rates[0]:.0f} MB/s to the bucket and {rates[1]:.0f} back, one request each"
        yield Finding(what, OK, text)
    except OSError as error:
        text, fix = in_words(error)
        yield Finding(what, FAILS, text, "use another store" if error.errno == errno.EOPNOTSUPP else fix)
