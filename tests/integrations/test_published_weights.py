"""A model of transformers in an inference process has the logits of the training run, version by version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from publishing.publish_worlds import publish, publisher, save

from ckpt_component.publishing import follow

transformers = pytest.importorskip("transformers", "4.50", reason="needs transformers: pip install '.[transformers]'")

pytestmark = pytest.mark.filterwarnings("ignore")


def logits_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(12, dtype=torch.int64, device="cpu")[None]
    with torch.inference_mode():
        return model.eval()(tokens).logits  # type: ignore[no-any-return]


def test_logits_follow_the_training(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    trained = transformers.GPT2LMHeadModel(config).bfloat16()
    config.save_pretrained(tmp_path / "base")
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    served = transformers.GPT2LMHeadModel(config).bfloat16()
    versions = follow(tmp_path / "to", tmp_path / "model", poll_seconds=0.01, timeout=30)
    for step in (1, 2, 3):
        trained.train()(
            torch.arange(12, device="cpu")[None], labels=torch.arange(12, device="cpu")[None]
        ).loss.backward()
        optimizer.step()
        path = save(tmp_path, step, trained.state_dict())
        done = publish(publisher(tmp_path / "to", tmp_path / "mirror", config_from=str(tmp_path / "base")), path, step)
        weights = next(versions)
        assert (weights.version, weights.step, done.is_whole) == (step, step, step == 1)
        expected = logits_of(trained)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(weights.path, dtype=torch.bfloat16)
        assert torch.equal(logits_of(loaded), expected)
        # As an engine takes them: by name, into a model that is there.
        served.load_state_dict(dict(weights.tensors()), strict=False)
        served.tie_weights()
        assert torch.equal(logits_of(served), expected)
    versions.close()
