"""`compose_checkpoint` in scripts: what it gives, what it says, and what it leaves alone."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException
from omegaconf import DictConfig
from strides import in_turn

from ckpt_component import CheckpointConfigError, CheckpointError, compose_checkpoint
from ckpt_component.config.hydra.hydra_errors import HydraConfigError

PRESETS = "async_persistent, async_temporal, async_zero_overhead, off, sync"


def test_without_arguments_it_is_the_preset_to_start_with() -> None:
    config = compose_checkpoint()
    assert isinstance(config, DictConfig)
    assert config == compose_checkpoint("async_persistent")


def test_slash_picks_a_part_and_dot_sets_a_value() -> None:
    config = compose_checkpoint("sync", ["checkpoint/writer=torch_save", "checkpoint.writer.workers=4"])
    assert config.writer == {
        "_target_": "ckpt_component.writers.TorchSaveWriter",
        "workers": 4,
        "block_bytes": 8388608,
        "checksum": "crc32",
        "io": "auto",
        "max_bytes_per_second": None,
    }


def test_a_value_may_be_quoted() -> None:
    assert compose_checkpoint(overrides=['checkpoint.dir="/data/a=b"']).dir == "/data/a=b"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "override", "text"),
    in_turn(
        [
            (
                "async_persistant",
                None,
                f"There is no checkpoint=async_persistant. Did you mean checkpoint=async_persistent? "
                f"checkpoint can be: {PRESETS}.",
            ),
            (
                "best",
                None,
                f"There is no checkpoint=best. checkpoint can be: {PRESETS}, or a file of your own, checkpoint/best.yaml in a "
                "--config-dir.",
            ),
            (
                "sync",
                "checkpoint/writer=safetensor",
                "There is no checkpoint/writer=safetensor. Did you mean checkpoint/writer=safetensors? "
                "checkpoint/writer can be: dcp, safetensors, torch_save.",
            ),
            (
                "sync",
                "checkpoint/stagr=pinned",
                "There is no group checkpoint/stagr. Did you mean checkpoint/stager=pinned?",
            ),
            (
                "sync",
                "checkpoint/writer/workers=4",
                "checkpoint/writer/workers is not a config group. Set a value with dots: checkpoint.writer.workers=4.",
            ),
            (
                "sync",
                "checkpoint.stager=pinned",
                "checkpoint.stager='pinned' sets a string; to choose a component use a slash: checkpoint/stager=pinned",
            ),
            (
                "sync",
                "checkpoint.stager=pined",
                "checkpoint.stager='pined' sets a string; to choose a component use a slash: checkpoint/stager=pinned",
            ),
            (
                "async_persistent",
                "checkpoint.stager.slotz=3",
                "There is no key checkpoint.stager.slotz. The keys of checkpoint.stager: arenas.",
            ),
            (
                "async_persistent",
                "checkpoint.stager.arena=3",
                "There is no key checkpoint.stager.arena. Did you mean checkpoint.stager.arenas=3?",
            ),
            (
                "async_zero_overhead",
                "checkpoint.stager.device_buffer_bytes=0",
                "checkpoint.stager.device_buffer_bytes was removed, because the device buffer never ran on a GPU; leave it "
                "out.",
            ),
            (
                "sync",
                "checkpoint.stager.arenas=3",
                "There is no key checkpoint.stager.arenas. checkpoint.stager has no keys.",
            ),
            (
                "sync",
                "writer.workers=3",
                "There is no key writer.workers. Did you mean checkpoint.writer.workers=3?",
            ),
            (
                "sync",
                "checkpoint.savee.every_steps=3",
                "There is no key checkpoint.savee.every_steps. Did you mean checkpoint.save.every_steps=3?",
            ),
            (
                "async_persistent",
                "checkpoint.recovery=host",
                "checkpoint.recovery='host' sets a string; to choose a component use a slash: checkpoint/recovery=host",
            ),
            (
                "async_persistent",
                "checkpoint/recovery=hots",
                "There is no checkpoint/recovery=hots. Did you mean checkpoint/recovery=host? checkpoint/recovery can be: "
                "host, none, peers.",
            ),
            (
                "async_persistent",
                "checkpoint.recovery.every=5",
                "There is no key checkpoint.recovery.every. Did you mean checkpoint.recovery.every_steps=5?",
            ),
            ("sync", "checkpoint.keep=3", "checkpoint.keep cannot itself be 3. Did you mean checkpoint.keep.last=3?"),
            (
                "sync",
                "checkpoint.keep.best=loss",
                "checkpoint.keep.best cannot itself be loss. Did you mean checkpoint.keep.best.metric=loss?",
            ),
            (
                "sync",
                "checkpoint.save=100",
                "checkpoint.save cannot itself be 100. The keys of checkpoint.save: every_steps, every_seconds, at_end, frozen.",
            ),
            (
                "sync",
                "checkpoint.writer.workers=four",
                "checkpoint.writer.workers must be a whole number, got four.",
            ),
            (
                "sync",
                "checkpoint.dir=/a=b",
                "checkpoint.dir=/a=b cannot be read (mismatched input '=' expecting <EOF>). A value with special characters "
                "needs quotes, in the shell two pairs of them: 'checkpoint.dir=\"/a=b\"'.",
            ),
            (
                "sync",
                "checkpoint.enabled",
                "'checkpoint.enabled' is not of the form key=value, such as checkpoint=async_persistent.",
            ),
            (
                "sync",
                "checkpoint.writer.workers=1,2",
                "checkpoint.writer.workers=1,2 has several values. Quote them if they are one string; to sweep, run a Hydra app "
                "with -m.",
            ),
            (
                "sync",
                "~checkpoint.keep.last",
                "checkpoint.keep.last cannot be deleted. Set it to null instead, if it may be null: checkpoint.keep.last=null",
            ),
        ],
        2,
    ),
)
def test_what_is_typed_wrong_is_told_in_words(preset: str, override: str | None, text: str) -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        compose_checkpoint(preset, [override] if override else [])
    assert str(caught.value) == text


def test_one_text_instead_of_a_list_is_refused() -> None:
    with pytest.raises(CheckpointConfigError, match="overrides must be a list"):
        compose_checkpoint("sync", "checkpoint.dir=x")


def test_the_error_is_of_both_families() -> None:
    assert issubclass(CheckpointConfigError, (CheckpointError))
    assert issubclass(CheckpointConfigError, ValueError)
    assert issubclass(HydraConfigError, (CheckpointConfigError, CompactHydraException))  # printed without a traceback


def test_hydra_is_left_as_it_was() -> None:
    compose_checkpoint()
    assert not GlobalHydra.instance().is_initialized()
    with pytest.raises(CheckpointConfigError):
        compose_checkpoint("nothing")
    assert not GlobalHydra.instance().is_initialized()


def test_a_session_of_the_users_goes_on(tmp_path: Path, hydra_version: dict[str, str]) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    with initialize_config_dir(str(tmp_path), **hydra_version):
        session = GlobalHydra.instance().hydra
        compose_checkpoint()
        with pytest.raises(CheckpointConfigError):
            compose_checkpoint("nothing")
        assert GlobalHydra.instance().hydra is session


def test_parts_of_the_app_that_runs_are_found(tmp_path: Path, hydra_version: dict[str, str]) -> None:
    folder = tmp_path / "checkpoint" / "stager"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: my_app.Stager\nfoo: 3\n")
    with initialize_config_dir(str(tmp_path), **hydra_version):
        config = compose_checkpoint(overrides=["checkpoint/stager=mine", "checkpoint.stager.foo=4"])
    assert config.stager == {"_target_": "my_app.Stager", "foo": 4}


def test_a_folder_of_ones_own_can_be_added_in_a_script(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint" / "stager"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: my_app.Stager\n")
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", "checkpoint/stager=mine"]
    assert compose_checkpoint("sync", overrides).stager == {"_target_": "my_app.Stager"}


@pytest.mark.slow
def test_an_argparse_script_composes_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse, sys\n"
        "from ckpt_component import CheckpointConfigError, compose_checkpoint\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--preset'), parser.add_argument('--set', action='append', default=[])\n"
        "args = parser.parse_args()\n"
        "try:\n"
        "    print(compose_checkpoint(args.preset, args.set).writer.workers, 'torch' in sys.modules)\n"
        "except CheckpointConfigError as error:\n"
        "    parser.error(str(error))\n"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert run("--preset", "sync", "--set", "checkpoint.writer.workers=7").stdout == "7 False\n"
    wrong = run("--preset", "synk")
    assert wrong.returncode == 2
    assert "Did you mean checkpoint=sync?" in wrong.stderr


def test_another_process_unpickles_a_composed_config() -> None:
    """As the workers of a launcher do, which have imported nothing of ours before."""
    config = compose_checkpoint("sync", ["checkpoint.timeouts.write=30m"])
    code = "import pickle, sys; config = pickle.load(sys.stdin.buffer); print(config.timeouts.write, config.on_error)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"30m raise\n", b"")
