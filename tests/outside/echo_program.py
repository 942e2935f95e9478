"""What the processes of test_connections.py run: says who it is, and ends with the code that it is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ckpt_component.core.outside import OUTSIDE, Outside, Socket


def wait_and(sock: Socket, interrupt: Callable[[], None]) -> None:
    sock.recv(1)
    interrupt()


def main(outside: Outside = OUTSIDE) -> None:
    sock = outside.inherited()
    word = outside.environment["WORD"]
    sock.sendall(f"{outside.pid()} {outside.parent()} {outside.host_name()} {word}\n".encode())
    if word == "interruptible":
        with outside.interruptible() as interrupt:
            outside.start("interrupts", wait_and, sock, interrupt)
            outside.sleep(1000)
    sys.exit(int(sock.recv(1)))
