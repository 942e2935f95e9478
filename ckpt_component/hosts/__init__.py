"""The bytes of other processes and hosts: sealed, named files, served by the process that has them.

A restore, a replica at a peer, a read that hosts share and an upload by host are all reads of such files.
"""
