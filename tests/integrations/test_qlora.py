"""QLoRA: a PEFT model with bitsandbytes' layers is killed, and its next losses are those of the run that was not."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from ckpt_component.core.storage.locate import storage_at
from ckpt_component.formats.opening import open_index
from ckpt_component.state.paths import FROZEN

SCRIPT = Path(__file__).parent / "scripts" / "qlora_job.py"
RANKS = SCRIPT.with_name("qlora_ranks.py")
NEEDED = ("bitsandbytes", "peft", "transformers")
lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(lacking), reason=f"pip install {' '.join(lacking)}")


def job(command: str, folder: Path) -> tuple[int, dict[tuple[str, str], object]]:
    line = [sys.executable, "-W", "ignore", str(SCRIPT), command, str(folder)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False, env=env)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    rows = [json.loads(text) for text in done.stdout.splitlines()]
    return done.returncode, {(kind, what): value for kind, what, value in rows}


@pytest.mark.timeout(500)
def test_qlora_resumes_with_equal_losses(tmp_path: Path) -> None:
    code, expected = job("begin", tmp_path)
    assert code == -signal.SIGKILL and len(expected) == 6
    code, found = job("resume", tmp_path)
    refused = {key: found.pop(key) for key in [*found] if key[1] == "other base"}
    assert found == expected
    assert len(refused) == 3
    assert all("the base model is another one" in str(text) for text in refused.values()), refused
    for kind in ("4 bits", "double", "8 bits"):
        keep, skip = (tmp_path / kind / frozen / "iter_0000003" for frozen in ("keep", "skip"))
        kept, left = (open_index(storage_at(str(path)), str(path)).entries for path in (keep, skip))
        names = {key for key in left if key.startswith("model.")}
        assert all("lora_" in key for key in names - {f"model.{FROZEN}"}) and len(names) == 13
        assert {key for key in kept if key.startswith("optimizer.")} == {key for key in left if "optimizer" in key}
        base = sum(entry.nbytes for key, entry in kept.items() if key.startswith("model.") and "lora_" not in key)
        sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in (keep, skip)]
        assert sizes[0] - sizes[1] > 0.9 * base


def test_qlora_resumes_in_fsdp2(tmp_path: Path) -> None:
    said = run_ranks(RANKS, "resume", 2, tmp_path)
    assert [text.count("the base model is another one") for text in said] == [2, 2], said
