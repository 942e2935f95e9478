"""Folders of save_pretrained load here, and `ckpt export hf` writes what from_pretrained reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_component import MissingKeysError, build_checkpointer
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.exporting.export import ExportOptions, export_checkpoint

transformers = pytest.importorskip("transformers", "4.50", reason="needs transformers: pip install '.[transformers]'")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
def test_folders_of_save_pretrained_load(shard: str, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16, num_labels=3)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "gpt2", max_shard_size=shard)
    assert (tmp_path / "gpt2" / "model.safetensors.index.json").exists() == (shard == "20KB")
    other = transformers.GPT2LMHeadModel(config)
    labels = transformers.GPT2ForSequenceClassification(config)
    with build_checkpointer("sync") as ours:
        # The output has the weights of the embedding, which are stored once.
        ours.load(tmp_path / "gpt2", {"model": other}, strict=True, prefix="model")
        with pytest.raises(MissingKeysError, match="score.weight") as caught:
            ours.load(tmp_path / "gpt2", labels, strict=True)
        assert caught.value.keys == ["score.weight"]
        ours.load(tmp_path / "gpt2", labels, strict=True, ignore=["score"])
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    assert other.lm_head.weight is other.transformer.wte.weight
    assert torch.equal(labels.transformer.h[1].attn.c_attn.weight, state["transformer.h.1.attn.c_attn.weight"])


@pytest.mark.parametrize("beside", [{}, {"step": 3}], ids=["alone", "beside_a_step"])
def test_from_pretrained_gets_the_weights_of_an_export(beside: dict[str, int], tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "base")
    with build_checkpointer("sync") as ours:
        ours.save({"model": model, **beside}, tmp_path / "saved")
    options = ExportOptions("hf", config_from=str(tmp_path / "base"))
    export_checkpoint(str(tmp_path / "saved"), str(tmp_path / "exported"), options, file_storage())
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items())
