from __future__ import annotations

import math

import pytest
import torch
from ckpt_train.model import Gpt, loss_of
from ckpt_train.schema import Model

from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

SIZE = Model(layers=2, heads=2, width=32, context=16, dropout=0.0)


@pytest.fixture
def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(SIZE)


def test_head_and_embedding_are_one_tensor_under_two_names(model: Gpt) -> None:
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()
    assert sum(parameter is model.tokens.weight for parameter in model.parameters()) == 1


def test_a_prediction_depends_on_the_past_alone(model: Gpt) -> None:
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10], after[0, 10])


def test_an_untrained_model_guesses(model: Gpt) -> None:
    tokens = torch.randint(0, 256, (8, 17))
    assert loss_of(model, tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(256), abs=0.1)


def test_initialisation_is_gpt_2s(model: Gpt) -> None:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert float(weights["tokens.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(weights["blocks.0.up.weight"].std()) == pytest.approx(0.02, rel=0.1)
    assert float(weights["blocks.0.down.weight"].std()) == pytest.approx(0.01, rel=0.1)  # two blocks of two
    assert float(weights["blocks.1.attention.out.weight"].std()) == pytest.approx(0.01, rel=0.1)
    assert not weights["blocks.0.attention.qkv.bias"].any()
    assert torch.equal(weights["norm.weight"], torch.ones(32))


def test_dropout_is_used_in_training_alone() -> None:
    model = Gpt(Model(layers=1, heads=1, width=32, context=16, dropout=0.5))
    tokens = torch.randint(0, 256, (1, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(CheckpointConfigError, match=r"model\.width=32 cannot be shared out to model\.heads=3"):
        Gpt(Model(layers=1, heads=3, width=32, context=16))
