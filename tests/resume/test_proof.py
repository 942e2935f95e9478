"""What an object gives back after a load is compared with what it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_checkpointer


class Own:
    """An object with a tensor, that does something with a state that it takes."""

    def __init__(self, value: float, takes: Callable[[Own, dict[str, Any]], None]) -> None:
        # Bytes are summed eight at a time, and four are left.
        self.weight, self.count = torch.full((1001,), float(value)), int(value)
        self._takes = takes

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.count = state["weight"], state["count"]
        self._takes(self, state)


TAKES: dict[str, tuple[Callable[[Own, dict[str, Any]], Any], tuple[str, ...]]] = {
    "takes it": (lambda own, state: None, ()),
    "copies it onto itself": (lambda own, state: own.weight.copy_(state["weight"]), ()),
    "changes the tensor that was filled": (lambda own, state: own.weight.mul_(2), ("own.weight",)),
    "changes its first value": (lambda own, state: own.weight[:1].add_(1), ("own.weight",)),
    "changes its last value": (lambda own, state: own.weight[-1:].add_(1), ("own.weight",)),
    "casts it": (lambda own, state: setattr(own, "weight", own.weight.half()), ("own.weight",)),
    "casts it in place": (lambda own, state: setattr(own.weight, "data", own.weight.double()), ("own.weight",)),
    "forgets": (lambda own, state: setattr(own, "count", 0), ("own.count",)),
}


@pytest.mark.parametrize("what", TAKES)
def test_an_object_that_gives_back_other_values_is_named(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    takes, differing = TAKES[what]
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        checkpointer.save({"own": Own(3, takes)}, tmp_path / "one")
        checkpointer.load(tmp_path / "one", {"own": Own(1, takes)})
        assert checkpointer.last_load is not None
        assert (checkpointer.last_load.differing, checkpointer.last_load.proven) == (
            differing,
            () if differing else ("own",),
        )
    told = [line for line in caplog.messages if "objects give back other values" in line]
    assert len(told) == len(differing) and all(f"{key} (" in told[0] for key in differing)


@pytest.mark.parametrize(("prove", "may_differ"), [("off", "[]"), ("on_read", "[own.c*]")])
def test_a_proof_can_be_left_out_and_keys_can_be_named(
    prove: str, may_differ: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [f"checkpoint.load.prove={prove}", f"checkpoint.load.may_differ={may_differ}"]
    takes, _ = TAKES["forgets"]
    with build_checkpointer("sync", overrides) as checkpointer:
        checkpointer.save({"own": Own(3, takes)}, tmp_path / "one")
        checkpointer.load(tmp_path / "one", {"own": Own(1, takes)})
    assert not any("objects give back other values" in line for line in caplog.messages)
