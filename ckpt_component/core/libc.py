"""C library functions that Python does not expose, and raw memory access, through ctypes.

Imports only the standard library, because the writer process imports it. A function that this C library does not have
is None.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

#: What `mmap` returns when it fails.
MAP_FAILED = ctypes.c_void_p(-1).value
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
#: Advice of Linux 5.14 and 6.1 that the module `mmap` does not define.
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
#: Maximum number of rows (address, length) per call, as in Linux, and the size of a row in bytes.
IOV_MAX = 1024
IOV_BYTES = 16

_libc = ctypes.CDLL(None, use_errno=True)
_INT, _LONG, _SIZE, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p


def _call(name: str, arguments: Sequence[Any], result: Any = _INT) -> Callable[..., Any] | None:
    function = getattr(_libc, name, None)
    if function is not None:
        function.argtypes, function.restype = arguments, result
    return function


mmap: Any = _call("mmap", (_POINTER, _SIZE, _INT, _INT, _INT, _LONG), _POINTER)
munmap: Any = _call("munmap", (_POINTER, _SIZE))
madvise: Any = _call("madvise", (_POINTER, _SIZE, _INT))
mincore: Any = _call("mincore", (_POINTER, _SIZE, ctypes.c_char_p))
preadv: Any = _call("preadv", (_INT, _POINTER, _INT, _LONG), ctypes.c_ssize_t)
renameat2 = _call("renameat2", (_INT, ctypes.c_char_p, _INT, ctypes.c_char_p, ctypes.c_uint))
process_vm_writev = _call(
    "process_vm_writev", (_INT, _POINTER, _SIZE, _POINTER, _SIZE, ctypes.c_ulong), ctypes.c_ssize_t
)
malloc_trim = _call("malloc_trim", (_SIZE,))

# These release the GIL while they run.
memmove = ctypes.memmove
string_buffer = ctypes.create_string_buffer
get_errno = ctypes.get_errno


def last_error() -> OSError:
    """The error of the last failed call in this thread."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def address_of(memory: memoryview) -> int:
    """The address of the first byte of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def views_of(nbytes: int) -> Callable[[int], Any]:
    """What views `nbytes` at an address, for many addresses: quicker than `memory_at`, and nothing is kept alive."""
    return (ctypes.c_ubyte * nbytes).from_address


def memory_at(address: int, nbytes: int, owner: object) -> memoryview:
    """View the bytes at an address without a copy. The view keeps `owner`, the owner of the memory, alive."""
    if nbytes == 0:
        return memoryview(b"")
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    block.owner = owner  # type: ignore[attr-defined]  # the view refers to the block, and the block to the owner
    return memoryview(block).cast("B")
