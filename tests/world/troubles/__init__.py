"""All that may happen, a function each; importing this fills `trouble.KINDS`."""

from world.troubles import hosts, memory, messages, processes, storages, weights

__all__ = ["hosts", "memory", "messages", "processes", "storages", "weights"]
