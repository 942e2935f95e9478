from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from ckpt_train.state import RngState

from ckpt_component.state import objects

CPU = torch.device("cpu")


def draw() -> float:
    return float(torch.rand(()))


@pytest.fixture(autouse=True)
def generators_are_as_before() -> Iterator[None]:
    before = RngState(CPU).state_dict()
    yield
    RngState(CPU).load_state_dict(before)


def test_a_state_brings_every_generator_back() -> None:
    rng = RngState(CPU)
    state = rng.state_dict()
    first = draw()
    rng.load_state_dict(state)
    assert draw() == first


def test_a_state_survives_safe_loading() -> None:
    rng = RngState(CPU)
    dumped = objects.dump(objects.encode(rng.state_dict(), "rng"))
    state = objects.decode(torch.load(io.BytesIO(dumped), weights_only=True))
    first = draw()
    rng.load_state_dict(state)
    assert draw() == first


def test_a_state_of_another_kind_of_machine_is_taken_as_far_as_it_goes() -> None:
    rng = RngState(CPU)
    expected = float(torch.rand(()))
    state = {**rng.state_dict(), "cuda": bytes(16)}
    first = float(torch.rand(()))
    rng.load_state_dict(state)
    assert float(torch.rand(())) == first != expected


def test_the_keys_are_always_the_same() -> None:
    assert list(RngState(CPU).state_dict()) == ["torch", "cuda", "alike"]


@pytest.mark.parametrize(
    ("saved", "loaded", "taken"),
    [(True, True, True), (False, False, True), (True, False, False), (False, True, False), (False, None, True)],
)
def test_generators_alike_on_all_ranks_stay_so_and_others_do_not_become_so(
    saved: bool, loaded: bool | None, taken: bool
) -> None:
    state = RngState(CPU, alike=saved).state_dict()
    first = draw()
    RngState(CPU, alike=loaded).load_state_dict(state)
    assert (draw() == first) == taken


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_brings_the_cuda_generator_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rng = RngState(device)
    dumped = objects.dump(objects.encode(rng.state_dict(), "rng"))
    state = objects.decode(torch.load(io.BytesIO(dumped), weights_only=True))
    first = torch.rand(4, device=device)
    rng.load_state_dict(state)
    assert torch.equal(torch.rand(4, device=device), first)
