"""The processes that upload from the folders of several hosts, and what they say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.background.upload_policy import UploadPolicy
from ckpt_component.core.commit.cleanup import RetentionPolicy
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.commit.names import MANIFEST, MEGATRON
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.commit.protocols import ManifestCommit
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.processes.start import Child, start_in_background
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.formats.verification import verify_checkpoint

SECONDS = 60.0


class HostProcesses:
    """The processes of the uploads of all hosts, of a run that has ended.

    Args:
        folder: of the local folders, and of the target, `slow`
        hosts: the hosts of the run
        target: another one
        **values: of the policy

    Attributes:
        messages: what the processes have said, each with its `host`
    """

    def __init__(self, folder: Path, hosts: Sequence[str], target: str | None = None, **values: Any) -> None:
        self.folder, self.target, self.hosts = folder, target or str(folder / "slow"), hosts
        self.values = {"run": "me", "events": True, "durable": False, "silent_seconds": 30.0, **values}
        renames = self.values.get("atomic_rename", True)
        self.storage = storage_at(self.target, durable=False, atomic_rename=renames)
        self.running: dict[str, Child] = {}
        self.begun: list[Child] = []
        self.messages: list[dict[str, Any]] = []

    def policy_of(self, host: str, **values: Any) -> UploadPolicy:
        """What the process of a host uploads."""
        return UploadPolicy(
            str(self.folder / host),
            self.target,
            MEGATRON,
            RetentionPolicy(last=1),
            hosts=tuple(self.hosts),
            host=host,
            rank=self.hosts.index(host),
            program="ckpt_component.hosts.host_uploads",
            **{**self.values, **values},
        )

    def start(self, *hosts: str, **values: Any) -> None:
        """Start the processes of hosts; `values` are of their policy."""
        for host in hosts:
            policy = asdict(self.policy_of(host, **values))
            self.running[host] = start_in_background(policy["program"], policy)
            self.running[host].hang_up()
            self.begun.append(self.running[host])

    def close(self) -> None:
        """End all processes, whatever they do."""
        for process in self.begun:
            if process.alive:
                os.kill(process.pid, signal.SIGCONT)
            process.end(0)

    def said(self, host: str, what: str, deadline: float = 0) -> dict[str, Any]:
        """Wait for a message of the process of a host."""
        deadline = deadline or time.monotonic() + SECONDS
        try:
            while (frame := self.running[host].receive(deadline)) is not None:
                self.messages.append({"host": host, **frame[0]})
                if what in frame[0]:
                    return frame[0]
        except TimeoutError:
            pytest.fail(f"{host} did not say {what} in time: {self.messages}")
        pytest.fail(f"{host} has ended and did not say {what}: {self.messages}")

    def fails(self, host: str, because: str) -> None:
        """Wait until the process of a host says that it has failed, and why."""
        deadline = time.monotonic() + SECONDS
        while because not in self.said(host, "failed", deadline)["error"]:
            pass

    def end(self) -> None:
        """Wait until all processes have ended by themselves."""
        for host, process in self.running.items():
            deadline = time.monotonic() + SECONDS
            while (frame := process.receive(deadline)) is not None:
                self.messages.append({"host": host, **frame[0]})
            assert process.wait(SECONDS) == 0

    def told(self, what: str) -> list[Any]:
        return [message[what] for message in self.messages if what in message]

    def attempt(self, step: int) -> tuple[Attempt, dict[str, Any]]:
        """The upload of a step, as each host finds it, and its manifest."""
        name = MEGATRON.folder(step)
        manifest = read_manifest(FileStorage(), str(self.folder / self.hosts[0] / name))
        assert manifest is not None
        return new_attempt(self.storage, os.path.join(self.target, name), manifest["attempt"]), manifest

    def committed(self) -> list[int]:
        """The steps that the target has; each is whole, and nothing else is in its folder."""
        scan = scan_steps(self.storage, self.target, MEGATRON)
        assert not (scan.damaged or scan.torn or scan.unusable)
        for step in scan.committed:
            path, manifest = os.path.join(self.target, MEGATRON.folder(step)), scan.manifests[step]
            assert verify_checkpoint(self.storage, path)
            assert "hosts" not in manifest and manifest["world_size"] == len(self.hosts)
            folder = os.path.join(path, manifest.get("at", ""))
            # If the request that deletes the draft is cut, a warning says that it stays.
            names = {MANIFEST, ManifestCommit.draft, *(each["name"] for each in manifest["files"])}
            others = {*self.storage.names(folder)} - names
            assert not others, f"{folder} has {others}: {self.messages}"
        return scan.committed
