"""Every key of `train` and `data` does what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ckpt_train.loop import run
from ckpt_train.report import Summary
from ckpt_train.training_job import TrainingJob
from omegaconf import DictConfig

from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

Composed = Callable[..., DictConfig]


@pytest.fixture
def job(compose_job: Composed) -> Callable[..., TrainingJob]:
    return lambda *overrides: TrainingJob(compose_job(*overrides), "/")


def weights(job: TrainingJob) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()])


@pytest.mark.slow
def test_it_learns(job: Callable[..., TrainingJob]) -> None:
    taught = job("train.lr=0.01", "model.dropout=0", "train.batch_size=8")
    losses = [taught.train_step().loss.item() for _ in range(40)]
    assert losses[0] == pytest.approx(5.5, abs=0.2) and losses[-1] < 4.6


def test_a_prediction_depends_on_the_past_alone(job: Callable[..., TrainingJob]) -> None:
    model = job("model.dropout=0").model
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10]) and not torch.equal(before[0, 10], after[0, 10])


def test_accumulated_batches_are_one_large_batch(job: Callable[..., TrainingJob]) -> None:
    split = job("train.batch_size=2", "train.accumulate=4", "model.dropout=0")
    whole = job("train.batch_size=8", "train.accumulate=1", "model.dropout=0")
    first, second = split.train_step(), whole.train_step()
    assert first.loss.item() == pytest.approx(second.loss.item(), rel=1e-5)
    assert first.norm.item() == pytest.approx(second.norm.item(), rel=1e-4)
    assert split.state["progress"] == whole.state["progress"] == {"step": 1, "tokens": 8 * 16}


def test_the_seed_decides_weights_and_order(job: Callable[..., TrainingJob]) -> None:
    first, second, other = job("train.seed=1"), job("train.seed=1"), job("train.seed=2")
    assert torch.equal(weights(first), weights(second)) and not torch.equal(weights(first), weights(other))
    assert not torch.equal(first.state["data"].state_dict()["order"], other.state["data"].state_dict()["order"])


def test_gradients_are_clipped_to_the_norm(job: Callable[..., TrainingJob]) -> None:
    def gradient_norm(*overrides: str) -> tuple[float, float]:
        clipped = job(*overrides)
        measured = clipped.train_step().norm.item()
        left = torch.linalg.vector_norm(
            torch.stack([p.grad.norm() for p in clipped.model.parameters() if p.grad is not None])
        ).item()
        return measured, left

    measured, left = gradient_norm("train.clip_norm=0.001")
    assert measured > 0.1 and left == pytest.approx(0.001, rel=1e-2)
    measured, left = gradient_norm("train.clip_norm=null")
    assert left == pytest.approx(measured, rel=1e-4)


def test_the_learning_rate_follows_the_keys(job: Callable[..., TrainingJob]) -> None:
    taught = job("train.lr=0.01", "train.warmup_steps=2", "train.decay_steps=4", "train.min_lr_ratio=0.5")
    rates = [taught.train_step().lr for _ in range(5)]
    assert rates == pytest.approx([0.005, 0.01, 0.0075, 0.005, 0.005])


def test_weight_decay_reaches_the_optimizer(job: Callable[..., TrainingJob]) -> None:
    assert [group["weight_decay"] for group in job("train.weight_decay=0.3").optimizer.param_groups] == [
        0.3,
        0.0,
    ]


def test_bfloat16_computes_in_bfloat16_and_keeps_float32(job: Callable[..., TrainingJob]) -> None:
    half, full = job("train.dtype=bfloat16", "model.dropout=0"), job("model.dropout=0")
    seen = []
    half.model.get_submodule("blocks.0.up").register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    first, second = half.train_step().loss.item(), full.train_step().loss.item()
    assert set(seen) == {torch.bfloat16}
    assert first == pytest.approx(second, rel=0.02) and first != second
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.float32}


def test_the_validation_loss_is_of_unseen_text_and_changes_nothing(job: Callable[..., TrainingJob]) -> None:
    taught = job()
    before = torch.get_rng_state()
    first = taught.validation_loss()
    assert first is not None and first == taught.validation_loss()
    assert torch.equal(torch.get_rng_state(), before)
    taught.train_step()
    assert not torch.equal(torch.get_rng_state(), before)  # dropout is back
    assert taught.validation_loss() != first
    assert job("data.validation=0").validation_loss() is None


def test_eval_batches_bounds_the_work(job: Callable[..., TrainingJob], text_file: Path) -> None:
    text_file.write_bytes(text_file.read_bytes() * 8)
    seen: list[int] = []

    def windows(*overrides: str) -> int:
        seen.clear()
        checked = job("data.validation=0.5", *overrides)
        checked.model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        checked.validation_loss()
        return sum(seen)

    assert windows("train.eval_batches=3", "train.batch_size=4") == 12
    assert windows("train.eval_batches=10000") == (340 * 8 // 2 - 1) // 16


def test_max_bytes_bounds_the_text(job: Callable[..., TrainingJob]) -> None:
    text = job("data.max_bytes=100").text
    assert len(text.train) + len(text.validation) == 100


def test_a_relative_path_starts_from_the_folder_of_the_launch(compose_job: Composed, text_file: Path) -> None:
    taught = TrainingJob(compose_job(f"data.path={text_file.name}"), str(text_file.parent))
    assert taught.text.source == f"data.path={text_file}"


def test_threads(job: Callable[..., TrainingJob]) -> None:
    before = torch.get_num_threads()
    try:
        assert "on 1 CPU threads" in job("train.threads=1").description
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(job: Callable[..., TrainingJob]) -> None:
    with pytest.raises(CheckpointConfigError, match=r"train\.device=cuda, but torch finds 0 CUDA device"):
        job("train.device=cuda")


@pytest.mark.slow
def test_parallel_is_one_of_three_and_nothing_to_one_process(job: Callable[..., TrainingJob]) -> None:
    losses = {kind: job(f"parallel={kind}").train_step().loss.item() for kind in ("ddp", "fsdp", "tp")}
    assert len(set(losses.values())) == 1
    with pytest.raises(CheckpointConfigError, match=r"got fspd. Did you mean parallel=fsdp\?"):
        job("parallel=fspd")
    with pytest.raises(CheckpointConfigError, match=r"parallel must be ddp, fsdp or tp, got 3."):
        job("parallel=3")


def reported(compose_job: Composed, *overrides: str) -> Summary:
    config = compose_job("checkpoint=off", *overrides)
    return run(TrainingJob(config, "/"), config.checkpoint, "/nowhere")


def test_reports_come_at_their_steps_and_at_the_last(compose_job: Composed) -> None:
    summary = reported(compose_job, "train.steps=7", "train.log_every=3", "train.eval_every=5")
    assert [step for step, _ in summary.losses] == [3, 6, 7]
    assert [step for step, _ in summary.validation] == [5, 7]
    assert reported(compose_job, "train.steps=2", "train.eval_every=null").validation == []


def test_a_reported_loss_is_the_mean_since_the_report_before(compose_job: Composed) -> None:
    single = reported(compose_job, "train.steps=4", "train.log_every=1").losses
    pairs = reported(compose_job, "train.steps=4", "train.log_every=2").losses
    assert pairs[1][1] == pytest.approx((single[2][1] + single[3][1]) / 2)
