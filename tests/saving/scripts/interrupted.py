"""Ctrl-C once or more often while a save is being written: `interrupted.py FOLDER TIMES PRESET`."""

import logging
import os
import signal
import sys
import threading
import time

import torch

from ckpt_component import CheckpointListener, build_manager


class PressCtrlC(CheckpointListener):
    """Presses it while the snapshot is being written."""

    def __init__(self, times: int) -> None:
        self.times = times

    def on_staged(self, report: object) -> None:
        threading.Thread(target=self.press, daemon=True).start()

    def press(self) -> None:
        for _ in range(self.times):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    def close(self) -> None:
        print("the listener is closed", flush=True)


logging.basicConfig(level=logging.INFO, format="%(message)s")
folder, times, preset = sys.argv[1:]
# The 4 MB take two seconds.
with build_manager(preset, ["checkpoint.writer.max_bytes_per_second=2MB"], dir=folder) as manager:
    manager.add_listener(PressCtrlC(int(times)))
    manager.save(5, {"weight": torch.ones(1_000_000)})
    time.sleep(60)
