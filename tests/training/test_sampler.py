from __future__ import annotations

import pytest
import torch
from ckpt_train.data import WindowSampler, cut, windows_in


def test_every_window_comes_once_an_epoch_in_another_order() -> None:
    sampler = WindowSampler(10, seed=1, fingerprint=0)
    first = torch.cat([sampler.take(3), sampler.take(3), sampler.take(4)]).tolist()
    second = sampler.take(10).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_batch_may_span_epochs() -> None:
    sampler = WindowSampler(3, seed=1, fingerprint=0)
    taken = sampler.take(8).tolist()
    assert sorted(taken[:3]) == sorted(taken[3:6]) == [0, 1, 2]


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        return WindowSampler(50, seed, 0).take(50).tolist()

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("taken", [1, 4, 10, 13])
def test_a_state_goes_on_exactly_into_later_epochs(taken: int) -> None:
    sampler = WindowSampler(10, seed=1, fingerprint=7)
    sampler.take(taken)
    other = WindowSampler(10, seed=2, fingerprint=7)
    state = {name: value.clone() if torch.is_tensor(value) else value for name, value in sampler.state_dict().items()}
    other.load_state_dict(state)
    assert torch.equal(other.take(25), sampler.take(25))


def test_taking_does_not_change_a_state_that_was_given_out() -> None:
    sampler = WindowSampler(10, seed=1, fingerprint=7)
    state = sampler.state_dict()
    before = state["order"].clone()
    sampler.take(15)
    assert torch.equal(state["order"], before)


def test_the_state_of_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the text is not the one"):
        WindowSampler(10, 1, fingerprint=7).load_state_dict(WindowSampler(10, 1, fingerprint=8).state_dict())


def test_windows_follow_each_other_and_targets_are_one_byte_on() -> None:
    text = torch.arange(13, dtype=torch.uint8)
    assert windows_in(text, 4) == 3
    inputs, targets = cut(text, torch.tensor([2, 0]), 4)
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert inputs.dtype == targets.dtype == torch.int64
