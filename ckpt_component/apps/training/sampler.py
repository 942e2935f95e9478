"""Which windows of the text come next. The whole state is checkpointed; nothing is derived anew on resume."""

from __future__ import annotations

from typing import Any

import torch


class WindowSampler:
    """Deals out the numbers of windows in a shuffled order, every one once per epoch.

    Args:
        windows: how many there are.
        seed: of the shuffling; it has a random generator of its own.
        fingerprint: of the text, which must be the same when the state is given back.
    """

    def __init__(self, windows: int, seed: int, fingerprint: int) -> None:
        self._windows = windows
        self._fingerprint = fingerprint
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    @property
    def epoch(self) -> int:
        """How many times all windows have been dealt."""
        return self._epoch

    def take(self, count: int) -> torch.Tensor:
        """The next `count` windows, int64; goes on into the next epoch when this one ends."""
        taken = []
        while count > 0:
            if self._position == self._windows:
                # A new tensor, because a checkpoint may still be copying the old one.
                self._order = self._shuffled()
                self._position = 0
                self._epoch += 1
            part = self._order[self._position : self._position + count]
            self._position += len(part)
            count -= len(part)
            taken.append(part)
        return torch.cat(taken).long()

    def state_dict(self) -> dict[str, Any]:
        """The order of this epoch, the place in it, and the generator of the orders to come."""
        return {
            "order": self._order,
            "position": self._position,
            "epoch": self._epoch,
            "generator": self._generator.get_state(),
            "text": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken.

        Raises:
            ValueError: the state is of another text.
        """
        if state["text"] != self._fingerprint:
            raise ValueError(
                "the text is not the one that training began with; give the same data.path and data.max_bytes"
            )
        self._order = state["order"]
        self._position = state["position"]
        self._epoch = state["epoch"]
        self._generator.set_state(state["generator"])

    def _shuffled(self) -> torch.Tensor:
        return torch.randperm(self._windows, generator=self._generator).int()


def windows_in(text: torch.Tensor, context: int) -> int:
    """How many windows of `context` bytes, each with the byte that follows, a text has."""
    return (len(text) - 1) // context


def cut(text: torch.Tensor, windows: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and the targets of some windows.

    Args:
        text: uint8, one dimension.
        windows: their numbers.
        context: their length.

    Returns:
        Two int64 tensors of shape (windows, context); the second is the first moved on by one byte.
    """
    places = windows[:, None] * context + torch.arange(context + 1)
    tokens = text[places].long()
    return tokens[:, :-1], tokens[:, 1:]
