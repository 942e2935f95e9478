"""The same GPT trained by Megatron-LM's own loop with and without our flag: same losses, same files, both directions.

Needs a working tree of Megatron-LM, MEGATRON_LM=FOLDER, and NumPy; CONTRIBUTING.md has the command. Core 0.16.1 needs
`six`, `regex`, `einops` and `pydantic` too, and the wheel of core 0.19.2 `triton`. What it asks of a GPU is done on the CPU
(cpu/sitecustomize.py), and nothing is compiled; its code, and the commands, are those of a user.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

MEGATRON = Path(os.environ.get("MEGATRON_LM", ""))
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.skipif(
        not (MEGATRON / "pretrain_gpt.py").is_file() or not MEGATRON.name,
        reason="needs Megatron-LM's source: MEGATRON_LM=FOLDER",
    ),
]

SECONDS = 400.0
ITERATIONS = range(1, 11)
#: Saves are at 4, 8 and, as the run ends, at 10.
GPT = shlex.split("""
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
--lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0.1 --hidden-dropout 0.1 --seed 1234
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --eval-interval 1000 --eval-iters 0
--transformer-impl local --distributed-backend gloo --no-persist-layer-norm --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--log-interval 1 --save-interval 4 --ckpt-format torch_dist
""")
FLAG = ["--async-save", "--use-persistent-ckpt-worker"]
LAYOUTS = {
    "data parallel, distributed optimizer, bf16": ["--use-distributed-optimizer", "--bf16"],
    "tensor parallel, fp32": ["--tensor-model-parallel-size", "2"],
}


@dataclass
class Loop:
    """Runs of Megatron's loop in one folder; what a run leaves is kept for the tests after it."""

    folder: Path
    layout: list[str]
    losses: dict[str, list[str]] = field(default_factory=dict)

    def checkpoints(self, name: str) -> Path:
        return self.folder / name

    def plain(self, name: str, *arguments: str) -> list[str]:
        """Train without our flag; returns the losses, an exact text for each iteration."""
        return self._train(name, [], arguments)

    def ours(self, name: str, *arguments: str) -> list[str]:
        """Train with our flag."""
        return self._train(name, ["-m", "ckpt_component.megatron"], [*FLAG, *arguments])

    def disturbed(self, **how: str) -> str:
        """Train with our flag until what `how` asks of cpu/sitecustomize.py ends it; returns what was printed."""
        code, output = self._run("disturbed", ["-m", "ckpt_component.megatron"], FLAG, how)
        assert code != 0, output[-20000:]
        return output

    def _train(self, name: str, flag: list[str], arguments: Sequence[str]) -> list[str]:
        code, output = self._run(name, flag, arguments, {})
        assert code == 0, output[-20000:]
        return self.losses[name]

    def _run(self, name: str, flag: list[str], arguments: Sequence[str], how: dict[str, str]) -> tuple[int, str]:
        log = self.folder / f"{name}.losses"
        log.unlink(missing_ok=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [*flag, str(MEGATRON / "pretrain_gpt.py"), *GPT, *self.layout, "--save", str(self.checkpoints(name))]
        path = [str(Path(__file__).parent / "cpu"), str(MEGATRON), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "LOOP_LOSSES": str(log),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        command = [*torchrun, *script, *arguments]
        with (self.folder / f"{name}.log").open("w+") as output:
            run = subprocess.Popen(command, cwd=self.folder, env=env | how, stdout=output, stderr=output)
            try:
                code = run.wait(timeout=SECONDS)
            finally:
                _assert_none_left(str(log), 30.0 if run.poll() is not None else 0.0)
                run.wait()
            output.seek(0)
            text = output.read()
        self.losses[name] = log.read_text().splitlines() if log.exists() else []
        return code, text


@pytest.fixture(scope="module", params=LAYOUTS)
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """With one run that nothing disturbs and that knows nothing of us."""
    loop = Loop(tmp_path_factory.mktemp("loop"), LAYOUTS[request.param])
    losses = loop.plain("plain")
    assert [int(line.split()[0]) for line in losses] == [*ITERATIONS]
    assert len({line.split("=")[1] for line in losses}) == len(losses)
    return loop


def test_losses_and_checkpoints_are_the_same_with_our_flag(loop: Loop) -> None:
    assert loop.ours("ours") == loop.losses["plain"]
    for iteration in (4, 8, 10):
        _assert_same(_iteration(loop, "plain", iteration), _iteration(loop, "ours", iteration))
    assert _latest(loop, "ours") == "10"


def test_megatron_resumes_from_our_checkpoint(loop: Loop) -> None:
    if "ours" not in loop.losses:
        loop.ours("ours")
    losses = loop.plain("plain from ours", "--load", str(loop.checkpoints("ours")), "--ckpt-step", "4")
    assert losses == loop.losses["plain"][4:]


def test_ours_resumes_from_megatrons_checkpoint(loop: Loop) -> None:
    losses = loop.ours("ours from plain", "--load", str(loop.checkpoints("plain")), "--ckpt-step", "4")
    assert losses == loop.losses["plain"][4:]
    _assert_same(_iteration(loop, "plain", 10), _iteration(loop, "ours from plain", 10))


def test_a_run_killed_while_it_saves_resumes(loop: Loop) -> None:
    output = loop.disturbed(LOOP_KILL="8")
    assert len(re.findall(r"exitcode  : -9", output)) == 2, output[-20000:]
    assert loop.losses["disturbed"] == loop.losses["plain"][:8]
    assert _latest(loop, "disturbed") == "4", "what was being saved is no checkpoint"
    files = sorted(path.name for path in _iteration(loop, "disturbed", 8).iterdir())
    assert files == ["__0_0.distcp", "__1_0.distcp"]
    _assert_it_resumes(loop)


def test_a_writer_process_that_dies_ends_the_run_on_all_ranks(loop: Loop) -> None:
    output = loop.disturbed(LOOP_KILL_WRITER="8")
    for rank in (0, 1):
        assert re.search(rf"\[rank{rank}\].*RanksError: .*Rank 1 failed.*was killed by SIGKILL", output), output[
            -20000:
        ]
    assert loop.losses["disturbed"][:8] == loop.losses["plain"][:8]
    assert _latest(loop, "disturbed") == "4"
    _assert_it_resumes(loop)


def _assert_it_resumes(loop: Loop) -> None:
    folder = loop.checkpoints("disturbed")
    assert loop.ours("resumed", "--load", str(folder), "--save", str(folder)) == loop.losses["plain"][4:]
    for iteration in (4, 8, 10):
        _assert_same(_iteration(loop, "plain", iteration), _iteration(loop, "disturbed", iteration))
    shutil.rmtree(folder)


def _iteration(loop: Loop, name: str, iteration: int) -> Path:
    return loop.checkpoints(name) / f"iter_{iteration:07d}"


def _latest(loop: Loop, name: str) -> str:
    return (loop.checkpoints(name) / "latest_checkpointed_iteration.txt").read_text().strip()


def _assert_same(first: Path, second: Path) -> None:
    """The same keys, and tensors equal in each bit."""
    ours, theirs = _tensors(first), _tensors(second)
    assert _keys(first) == _keys(second)
    assert len(ours) >= 15
    different = [key for key in ours if not torch.equal(_bytes(ours[key]), _bytes(theirs[key]))]
    assert not different, (first, second)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _keys(folder: Path) -> set[str]:
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the checkpoint; the rest of it are pickles of Megatron's classes, with paths in them."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    shapes = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    values = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in shapes.items()}
    dcp.load(values, storage_reader=FileSystemReader(folder), no_dist=True)
    return values


def _assert_none_left(mark: str, patience: float) -> None:
    """No process of the run is left, not even one that lost its parents; its environment names it."""
    deadline = time.monotonic() + patience
    while left := [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and mark.encode() in _environment(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes left after {patience:g} s: {left}")
        time.sleep(0.1)


def _environment(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or ends
        return b""
