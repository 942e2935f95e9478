"""The errors of obstore as OSError, with the store's own words and without what may be secret."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator

#: Types of others that obstore raises too, those of OSError without an errno.
_BUILT_IN = (OSError, ValueError, NotImplementedError)
_ERRNO_OF_STATUS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 507: errno.ENOSPC}
_ERRNO_OF_TYPE = {
    "FileNotFoundError": errno.ENOENT,
    "AlreadyExistsError": errno.EEXIST,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "NotSupportedError": errno.EOPNOTSUPP,
    "NotImplementedError": errno.EOPNOTSUPP,
    "ValueError": errno.EINVAL,
}
#: In the text of an error that has no other type: what it means.
_ERRNO_OF_TEXT = {
    "<Code>InvalidBucketName": errno.EINVAL,
    "<Code>InvalidResourceName": errno.EINVAL,
    "kind: Timeout": errno.ETIMEDOUT,
    "timed out": errno.ETIMEDOUT,
    "kind: Interrupted": errno.ECONNRESET,  # before or after the store has seen the request
    "kind: Connect": errno.ECONNREFUSED,
    "error sending request": errno.ECONNRESET,
}
_STATUS = re.compile(r"status code: (\d{3})")
_BODY = re.compile(r": <\?xml.*", re.S)
_CODE_AND_MESSAGE = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.S)


@contextlib.contextmanager
def typed_errors(path: str) -> Iterator[None]:
    """Turn the errors of obstore into OSError. They are not kept as the cause: they repeat whole requests."""
    try:
        yield
    except Exception as error:
        of_package = type(error).__module__.startswith("obstore")
        if not of_package and (not isinstance(error, _BUILT_IN) or getattr(error, "errno", None) is not None):
            raise
        text = str(error)
        status = _STATUS.search(text)
        code = _ERRNO_OF_TYPE.get(type(error).__name__) or _ERRNO_OF_STATUS.get(int(status[1]) if status else 0)
        if code is None:
            code = next((code for sign, code in _ERRNO_OF_TEXT.items() if sign in text), errno.EIO)
        if status is not None and status[1] == "409" and "AlreadyExists<" not in text:
            code = errno.EAGAIN  # S3, of simultaneous puts; Azure says it of a name that is taken
        raise OSError(code, text_of(error), path) from None


def text_of(error: Exception) -> str:
    """The answer of the store, without its request and without a query, which may have a signature."""
    text = str(error).partition("\n\nDebug source")[0].rpartition("Server returned non-2xx status code: ")[2]
    answer = _CODE_AND_MESSAGE.search(text)
    # Azure's message has the request's number and time on lines of their own.
    text = _BODY.sub("" if answer is None else f": {answer[1]}: {answer[2].partition(chr(10))[0].strip()}", text)
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text)[:500]
