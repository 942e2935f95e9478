"""A thread goes on saving while the interpreter ends: `ending.py PRESET`. Prints what the thread got, and what a load did."""

import atexit
import sys
import threading

import torch

from ckpt_component import CheckpointError, build_checkpointer, build_manager

manager = build_manager(sys.argv[1], ["checkpoint.durability=process_crash", "checkpoint.keep.last=2"], dir="run")
checkpointer = build_checkpointer("sync")
state = {"weight": torch.ones(300_000), **{f"bias{number}": torch.ones(3) for number in range(20)}}
saved = threading.Event()


def save_for_ever() -> None:
    try:
        for step in range(1, 1_000_000):
            manager.save(step, state)
            manager.wait()
            saved.set()
    except CheckpointError as error:
        print(f"save: {error}", flush=True)


def load_once() -> None:
    try:
        loaded = checkpointer.load("run")
        print(f"load: {len(loaded)} values", flush=True)
    except CheckpointError as error:
        print(f"load: {error}", flush=True)


thread = threading.Thread(target=save_for_ever, daemon=True)
thread.start()
saved.wait(60)
# The last to be registered run first: before the manager is closed, the thread has its answer.
atexit.register(load_once)
atexit.register(thread.join, 60)
