"""A restore into objects that are not those of the checkpoint: refused before anything is loaded, or as one says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointLoadError, MissingKeysError, build_manager


def module_and_optimizer(layers: int, optimizer: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """A model of so many layers and its optimizer, after one step."""
    torch.manual_seed(layers)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    state = {"model": model, "optimizer": optimizer(model.parameters(), lr=0.1)}
    take_a_step(state)
    return state


def take_a_step(state: Mapping[str, Any]) -> None:
    state["model"](torch.ones(4)).sum().backward()
    state["optimizer"].step()


@pytest.mark.parametrize("strict", [True, False])
def test_keys_that_a_module_would_refuse_are_refused_before_anything_is_loaded(strict: bool, tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, module_and_optimizer(2, torch.optim.AdamW))
    smaller = module_and_optimizer(1, torch.optim.AdamW)
    before = [parameter.detach().clone() for parameter in smaller["model"].parameters()]
    text = r"'model\.1\.weight' in the checkpoint has no place in 'model' \(Sequential\).*; ignore leaves keys out"
    with build_manager("sync", ["checkpoint.resume=1"], dir=tmp_path) as manager:
        with pytest.raises(CheckpointLoadError, match=text):
            manager.restore(smaller, strict=strict)
        assert all(map(torch.equal, smaller["model"].parameters(), before))
        assert manager.restore(smaller, ignore=["model.1", "optimizer"]) == 1


def test_an_object_that_refuses_its_state_is_named_with_what_to_do(tmp_path: Path) -> None:
    class Versioned:
        def __init__(self, version: int) -> None:
            self.version = version

        def state_dict(self) -> dict[str, int]:
            return {"version": self.version}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if state["version"] != self.version:
                raise ValueError(f"version {state['version']} is too old")

    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"sampler": Versioned(1), "step": 0})
    state = {"sampler": Versioned(2), "step": 0}
    with build_manager("sync", ["checkpoint.resume=1"], dir=tmp_path) as manager:
        with pytest.raises(
            CheckpointLoadError, match=r"'sampler' \(Versioned\) did not take .*; with its name in ignore"
        ):
            manager.restore(state)
        assert manager.restore(state, ignore=["sampler"]) == 1


def test_a_larger_model_takes_what_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    smaller = module_and_optimizer(1, torch.optim.AdamW)
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, smaller)
    larger = module_and_optimizer(2, torch.optim.AdamW)
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.restore(larger, strict=False) == 1
    weights = [state["model"][0].weight for state in (smaller, larger)]
    assert torch.equal(
        smaller["optimizer"].state[weights[0]]["exp_avg"], larger["optimizer"].state[weights[1]]["exp_avg"]
    )
    assert "has no state of model.1.weight, model.1.bias, which begins without" in caplog.text


def test_options_that_a_resume_does_not_use_are_named_when_it_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(7, module_and_optimizer(2, torch.optim.AdamW))
    smaller = module_and_optimizer(1, torch.optim.AdamW)
    with build_manager("sync", dir=tmp_path) as manager, pytest.raises(CheckpointLoadError, match="has no place in"):
        manager.restore(smaller, ignore=["model.1", "optimizer"])
    assert "ignore was not used; to use it, add checkpoint.resume=7" in caplog.text


def test_advice_on_names_can_be_typed(tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(7, {"model": {"weight": torch.ones(2)}})
    typo: dict[str, Any] = {"modle": {"weight": torch.zeros(2)}}
    with build_manager("sync", dir=tmp_path) as manager, pytest.raises(MissingKeysError) as caught:
        manager.restore(typo)
    advice = "use that name, or pass rename={'model': 'modle'}. Here it also needs checkpoint.resume=7."
    assert str(caught.value).endswith(f"The checkpoint has 'modle' as 'model': {advice}")
    with build_manager("sync", ["checkpoint.resume=7"], dir=tmp_path) as manager:
        assert manager.restore(typo, rename={"model": "modle"}) == 7


def test_settings_of_an_optimizer_that_the_checkpoint_lacks_stay_as_they_are(tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, module_and_optimizer(1, torch.optim.AdamW))
    other = module_and_optimizer(1, partial(torch.optim.SGD, momentum=0.5))
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.restore(other, strict=False) == 1
        assert other["optimizer"].param_groups[0]["momentum"] == 0.5
        take_a_step(other)
        manager.save(2, other)
