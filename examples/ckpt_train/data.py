"""The text to train on, as bytes, and the order of its windows."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt_component.config.hydra.hydra_errors import HydraConfigError


@dataclass(frozen=True)
class Text:
    """Bytes to learn from.

    Attributes:
        train: uint8, one dimension
        validation: uint8; the end of the text, never trained on. May be empty.
        source: description of the source, for logs
        fingerprint: checksum of the whole text, which a resumed run compares
    """

    train: torch.Tensor
    validation: torch.Tensor
    source: str
    fingerprint: int


def load_text(path: str | None, max_bytes: int, validation: float, context: int) -> Text:
    """Read the text and split it.

    Args:
        path: a file, or a folder whose files are read in the order of their names, except hidden and binary ones;
            None: modules of Python's standard library
        max_bytes: bytes to use at most
        validation: fraction held out from training, from 0 to 1
        context: length of a window in bytes

    Raises:
        CheckpointConfigError: the path does not exist, or there is too little text for one window
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    source = "Python's standard library" if path is None else f"data.path={path}"
    if not root.exists():
        raise HydraConfigError(
            f"{source} does not exist; give a file or a folder of text, "
            "or leave data.path out for Python's standard library."
        )
    files = [root] if root.is_file() else sorted(root.glob("*.py") if path is None else root.rglob("*"))
    data = bytearray()
    for file in files:
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if file.is_file() and not hidden and len(data) < max_bytes:
            with file.open("rb") as opened:
                content = opened.read(max_bytes - len(data))
            data += b"" if b"\0" in content else content
    # A window needs one more byte than its inputs, the last target.
    split = len(data) - int(len(data) * validation)
    if 0 < len(data) - split <= context:
        split = len(data) - context - 1
    if split <= context:
        raise HydraConfigError(
            f"{source} has {len(data)} bytes of text (data.max_bytes={max_bytes}), too few to train "
            f"and validate with model.context={context}; give more text."
        )
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    return Text(tensor[:split], tensor[split:], source, zlib.crc32(data))


class WindowSampler:
    """Returns the numbers of windows in shuffled order, each once per epoch.

    Args:
        windows: number of windows
        seed: seed of the sampler's own random generator
        fingerprint: fingerprint of the text, which must match when a state is loaded
    """

    def __init__(self, windows: int, seed: int, fingerprint: int) -> None:
        self._windows = windows
        self._fingerprint = fingerprint
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._position = 0
        self._order = self._shuffled()

    def take(self, count: int) -> torch.Tensor:
        """The next `count` windows, int64; continues with the next epoch when this one ends."""
        parts = []
        while count > 0:
            if self._position == self._windows:
                # A new tensor, because a checkpoint may still be copying the old one.
                self._order = self._shuffled()
                self._position = 0
            part = self._order[self._position : self._position + count]
            self._position += len(part)
            count -= len(part)
            parts.append(part)
        return torch.cat(parts).long()

    def state_dict(self) -> dict[str, Any]:
        """The order of this epoch, the position in it, and the generator for later epochs."""
        return {
            "order": self._order,
            "position": self._position,
            "generator": self._generator.get_state(),
            "text": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: the state belongs to another text
        """
        if state["text"] != self._fingerprint:
            raise ValueError(
                "the text is not the one that training began with; give the same data.path and data.max_bytes"
            )
        self._order = state["order"]
        self._position = state["position"]
        self._generator.set_state(state["generator"])

    def _shuffled(self) -> torch.Tensor:
        return torch.randperm(self._windows, generator=self._generator, dtype=torch.int64, device="cpu").int()


def windows_in(text: torch.Tensor, context: int) -> int:
    """The number of windows of `context` bytes in a text, each with the byte that follows it."""
    return (len(text) - 1) // context


def cut(text: torch.Tensor, windows: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of some windows.

    Args:
        text: uint8, one dimension
        windows: numbers of the windows
        context: length of a window

    Returns:
        Two int64 tensors of shape (windows, context); the second is the first shifted by one byte.
    """
    places = windows[:, None] * context + torch.arange(context + 1, dtype=torch.int64, device=text.device)
    tokens = text[places].long()
    return tokens[:, :-1], tokens[:, 1:]
