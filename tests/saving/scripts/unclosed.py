"""A script that ends while a save is being written, and does not close what saves it: `unclosed.py INTERRUPTS`.

So many times Ctrl-C is pressed: first while `close` waits, then while the interpreter does.
"""

import os
import signal
import sys
import threading

import torch

from ckpt_component import build_checkpointer

interrupts = int(sys.argv[1])
slow = ["checkpoint.writer.max_bytes_per_second=4MB", "checkpoint.durability=process_crash"]
checkpointer = build_checkpointer("async_persistent", slow)
checkpointer.save({"weight": torch.ones(3_000_000)}, "one")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


for number in range(interrupts):
    timer = threading.Timer(0.4 + 0.7 * number, press)
    timer.daemon = True  # else the interpreter waits for it first
    timer.start()
if interrupts:
    try:
        checkpointer.close()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
