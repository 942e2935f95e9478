"""All that may happen, a function each; importing this fills `trouble.KINDS`."""

from world.troubles import folders, hosts, memory, messages, processes, storages, uploads, weights

__all__ = ["folders", "hosts", "memory", "messages", "processes", "storages", "uploads", "weights"]
