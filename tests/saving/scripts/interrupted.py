"""Ctrl-C once or more often while a save is being written: `interrupted.py FOLDER TIMES`."""

import logging
import os
import signal
import sys
import threading
import time

import torch

from ckpt_component import build_manager


def press_ctrl_c(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)


logging.basicConfig(level=logging.INFO, format="%(message)s")
folder, times = sys.argv[1:]
# The 4 MB take two seconds.
with build_manager("async_persistent", ["checkpoint.writer.max_bytes_per_second=2MB"], dir=folder) as manager:
    manager.save(5, {"weight": torch.ones(1_000_000)})
    threading.Thread(target=press_ctrl_c, args=[int(times)], daemon=True).start()
    time.sleep(60)
