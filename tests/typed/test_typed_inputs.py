"""What people type, and what they are answered: each command, a Hydra app, and Python, in one process and without
training. Every row that ends in an error has the words that help, no traceback, and no advice that does not work.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from ckpt_bench import app as bench_app
from ckpt_train.app import main as ckpt_train
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from kept_configs import resolve_once
from omegaconf.errors import OmegaConfBaseException
from strides import in_turn

from ckpt_component import (
    CheckpointConfigError,
    CheckpointError,
    build_checkpointer,
    build_manager,
    load_weights,
)
from ckpt_component.cli.app import main as ckpt
from ckpt_component.config import override_hints, resolve_config

#: Instead of a config that is resolved already.
SYNC = object()
HYDRA = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
Ask = Callable[[list[str]], "str | None"]
#: What Hydra says of its own accord around an error.
HYDRAS_OWN = ("Set the environment variable", "Error executing job with overrides")


class Reached(Exception):
    """The run would begin now."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder, a home, and logging as they were; and no run begins."""

    def reach(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NOPE", raising=False)
    monkeypatch.setattr("ckpt_train.training_job.TrainingJob.__init__", reach)
    monkeypatch.setattr(bench_app, "Runner", reach)
    handlers, level = logging.root.handlers[:], logging.root.level
    disabled = {name: logger.disabled for name, logger in _loggers().items()}
    with warnings.catch_warnings():
        yield
    for handler in logging.root.handlers[:]:
        if handler not in handlers:
            logging.root.removeHandler(handler)
            handler.close()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    for name, logger in _loggers().items():
        logger.disabled = disabled.get(name, False)


def _loggers() -> dict[str, logging.Logger]:
    return {name: item for name, item in logging.root.manager.loggerDict.items() if isinstance(item, logging.Logger)}


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configs of a Hydra app that has our group, and knows nothing of our commands."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "config.yaml").write_text(
        "defaults: [checkpoint: async_persistent, _self_]\nlr: 1.0\ncheckpoint: {save: {every_steps: 20}}\n"
    )
    return folder


@pytest.fixture(scope="module")
def ask(conf: Path) -> Ask:
    """Compose as an app with hints does, and build what it asks for; returns the error's text, None without one."""

    def asked(overrides: list[str]) -> str | None:
        try:
            with override_hints(), initialize_config_dir(str(conf), **HYDRA):
                config = compose("config", overrides).checkpoint
            if resolve_config(config).enabled:
                build_checkpointer(config).close()
        except (HydraException, OmegaConfBaseException) as error:
            return str(error)
        return None

    return asked


def typed(entry: Callable[[], None], line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str | None:
    """What is printed before the command ends with an error; None when a run would begin."""
    monkeypatch.setattr(sys, "argv", ["app", *shlex.split(line)])
    try:
        entry()
    except SystemExit as leaving:
        printed = capsys.readouterr()
        output = printed.out + printed.err + (leaving.code if isinstance(leaving.code, str) else "")
        if "Reached" in output:
            return None
        assert leaving.code not in (0, None), output
        # Hydra 1.4 shows the job's own frames above any error that the job raises.
        assert "Traceback" not in output or not HYDRA, output
        return "\n".join(text for text in output.splitlines() if text.strip() and not text.startswith(HYDRAS_OWN))
    return None


def answered(entry: Callable[[], None], line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    text = typed(entry, line, monkeypatch, capsys)
    assert text is not None, f"{line} was accepted in silence"
    assert len(text.splitlines()) == 1 or not HYDRA, f"the line that helps must stand alone:\n{text}"
    return text


#: For any Hydra app with our group and hints. A tuple is what the answer has, `None` that the run begins.
ANY_APP: list[tuple[str, str | None]] = [
    # presets
    ("checkpoint=async_persistant", "Did you mean checkpoint=async_persistent?"),
    ("checkpoint=synk", "Did you mean checkpoint=sync?"),
    ("checkpoint=best", "There is no checkpoint=best. checkpoint can be: async_persistent,"),
    ("checkpoint=null", "type checkpoint=off"),
    ("chekpoint=sync", "Did you mean checkpoint=sync?"),
    ("ckpt=sync", "Did you mean checkpoint=sync?"),
    ("+checkpoint=sync", "Did you mean checkpoint=sync?"),
    ("+checkpoint=async_persistent", "Did you mean checkpoint=async_persistent?"),
    ("+checkpoint/stager=shared_memory", "Did you mean checkpoint/stager=shared_memory?"),
    ("checkpoint = sync", "Did you mean checkpoint=sync?"),
    ("checkpoint =sync", "Did you mean checkpoint=sync?"),
    ("checkpoint= sync", "Did you mean checkpoint=sync?"),
    ("checkpoint==sync", "Did you mean checkpoint=sync?"),
    ("checkpoint:sync", "Did you mean checkpoint=sync?"),
    ("checkpoint", "such as checkpoint=async_persistent"),
    ("checkpoint=off", None),
    # recipes
    ("recipe=safest", "Did you mean +recipe=safest?"),
    ("+recipe=saffest", "Did you mean +recipe=safest?"),
    ("+recipe=safest +recipe=fastest", "Did you mean +recipe=[safest,fastest]?"),
    ("+recipe=nowhere", "There is no recipe=nowhere. recipe can be: "),
    ("+recipe=safest", None),
    # parts
    ("stager=pinned", "Did you mean checkpoint/stager=pinned?"),
    ("writer=dpc", "Did you mean checkpoint/writer=dcp?"),
    ("checkpoint/stagr=pinned", "Did you mean checkpoint/stager=pinned?"),
    ("checkpoint/stager=pined", "Did you mean checkpoint/stager=pinned?"),
    ("checkpoint/stager=null", "checkpoint/stager=null picks nothing"),
    ("checkpoint/stager=none", "Use checkpoint/caller=inline"),
    ("checkpoint=sync checkpoint.max_stall_s=3", "Use checkpoint=async_persistent"),
    ("checkpoint/stager=mine", "There is no checkpoint/stager=mine. checkpoint/stager can be: none, pinned,"),
    ("checkpoint/stager.arenas=2", "Did you mean checkpoint.stager.arenas=2?"),
    ("checkpoint/writer/workers=4", "checkpoint.writer.workers=4"),
    ("checkpoint.stager=pinned", "checkpoint/stager=pinned"),
    ("checkpoint.stager=pined", "checkpoint/stager=pinned"),
    ("checkpoint.stager=foo", "checkpoint/stager=shared_memory"),
    ("checkpoint.stager=3", "checkpoint/stager=shared_memory"),
    ("checkpoint.stager=null", "checkpoint/stager=shared_memory"),
    ("checkpoint.caller.nice=19", None),
    # keys
    ("workers=3", "Did you mean checkpoint.writer.workers=3?"),
    ("writer.workers=3", "Did you mean checkpoint.writer.workers=3?"),
    ("every_steps=3", "Did you mean checkpoint.save.every_steps=3?"),
    ("checkpoint.writer.worker=4", "Did you mean checkpoint.writer.workers=4?"),
    ("+checkpoint.writer.worker=4", "Did you mean checkpoint.writer.workers?"),
    ("checkpoint.nmaing=step", "Did you mean checkpoint.naming=step?"),
    ("checkpoint.savee.every_steps=3", "Did you mean checkpoint.save.every_steps=3?"),
    ("checkpoint.save.every=3", "Did you mean checkpoint.save.every_steps=3?"),
    ("checkpoint.save=4", "The keys of checkpoint.save: every_steps, every_seconds, at_end, frozen."),
    ("checkpoint.keep=null", "The keys of checkpoint.keep: last, every_steps, best."),
    ("checkpoint.timeouts=30", "The keys of checkpoint.timeouts: worker_start,"),
    ("checkpoint.xyz=3", "There is no key checkpoint.xyz. The keys of checkpoint:"),
    ("~checkpoint.keep.last", "checkpoint.keep.last=null"),
    # values
    ("checkpoint.writer.workers=four", "checkpoint.writer.workers must be a whole number, got four."),
    ("checkpoint.writer.workers=2.5", "checkpoint.writer.workers must be a whole number, got 2.5."),
    ("checkpoint.writer.workers=null", "checkpoint.writer.workers cannot be null."),
    ("checkpoint.writer.workers=0", "from 1 to 128, got 0"),
    ("checkpoint.writer.workers=1000", "from 1 to 128, got 1000"),
    ("checkpoint.stager.arenas=100", "from 1 to 16, got 100"),
    ("checkpoint.keep.last=0", "at least 1, got 0"),
    ("checkpoint.keep.last=ten", "checkpoint.keep.last must be a whole number, got ten."),
    ("checkpoint.enabled=maybe", "checkpoint.enabled must be true or false, got maybe."),
    ("checkpoint.overlap=thread", "must be wait, skip or error, got thread."),
    ("checkpoint.overlap=wiat", "Did you mean checkpoint.overlap=wait?"),
    ("checkpoint.on_error=retyr", "Did you mean checkpoint.on_error=retry?"),
    ("checkpoint.on_error=OnError.raise", "must be raise, warn or retry, got OnError.raise."),
    ("checkpoint.on_error=raise", None),
    ("checkpoint.verify=off", None),
    ("checkpoint.verify=false", "quote it: 'off'"),
    ("checkpoint.naming=3", "must be megatron, step, huggingface or torchtitan, got 3."),
    ("checkpoint.writer.checksum=md5", "must be crc32, crc32c, xxh3_64 or auto, got md5."),
    ("checkpoint.writer.io=directt", "Did you mean checkpoint.writer.io=direct?"),
    ("checkpoint.resume=nevr", "Did you mean checkpoint.resume=never?"),
    ("checkpoint.resume=latest", "must be auto, must, never, best, a step or a path, got latest."),
    ("checkpoint.resume=-1", "must be auto, must, never, best, a step or a path, got -1."),
    ("checkpoint.resume=true", "checkpoint.resume cannot be true"),
    ("checkpoint.resume=12", None),
    # sizes and times
    ("checkpoint.writer.block_bytes=8MB", None),
    ("checkpoint.writer.block_bytes=8MiB", None),
    ("checkpoint.writer.block_bytes=8XB", "8MiB (MiB = 2^20)"),
    ("checkpoint.writer.block_bytes=1", "from 4096 to 1073741824, got 1."),
    ("checkpoint.writer.max_bytes_per_second=1GB", None),
    ("checkpoint.min_free_bytes=10GB", None),
    ("checkpoint.min_free_bytes=-1", "at least 0, got -1"),
    ("checkpoint.timeouts.write=30m", None),
    ("checkpoint.timeouts.write=60", None),
    ("checkpoint.timeouts.write=1", None),
    ("checkpoint.timeouts.heartbeat=400", None),
    ("checkpoint.timeouts.stall=2h", None),
    ("checkpoint.timeouts.write=30x", "90s, 30m, 2h; got 30x."),
    ("checkpoint.timeouts.write=0", "a finite number above 0, got 0"),
    ("checkpoint.timeouts.write=inf", "a finite number above 0, got inf"),
    ("checkpoint.timeouts.write=true", "checkpoint.timeouts.write cannot be true"),
    ("checkpoint.timeouts.stall=50 checkpoint.timeouts.write=40", "must be less than checkpoint.timeouts.write=40"),
    ("checkpoint.save.every_seconds=10m", None),
    ("checkpoint.retry.backoff_seconds=2m", None),
    ("checkpoint.max_stall_s=10m", None),
    ("checkpoint.max_stall_s=0", "a finite number above 0"),
    # folders
    ("checkpoint.dir=~/ck", "'checkpoint.dir=\"~/ck\"'"),
    ("'checkpoint.dir=\"~/ck\"'", None),
    ("'checkpoint.dir=\"~nobody_here/ck\"'", "there is no home folder of nobody_here"),
    ("'checkpoint.dir=$HOME/ck'", None),
    ("'checkpoint.dir=$NOPE/ck'", "the environment variable NOPE is not set"),
    ("'checkpoint.dir=${oc.env:NOPE}/ck'", "Environment variable 'NOPE' not found"),
    ("'checkpoint.dir=${HOME}/ck'", "An environment variable is ${oc.env:HOME}."),
    ("checkpoint.dir=", "checkpoint.dir=checkpoints"),
    ("checkpoint.dir=ftp://host/ck", "no folder and no bucket"),
    ("checkpoint.dir=s3:/bucket/ck", "type s3://bucket/ck"),
    ("checkpoint.dir=/a=b", "'checkpoint.dir=\"/a=b\"'"),
    ("checkpoint.dir=???", "checkpoint.dir is missing"),
]

TRAIN: list[tuple[str, str | None]] = [
    ("checkpoint=sync,off", "-m checkpoint=sync,off"),
    ("checkpoint.writer.workers=1,2", "-m checkpoint.writer.workers=1,2"),
    ("checkpoint=off", None),
    ("checkpoint.dir=$NOPE", "the environment variable NOPE is not set"),
    ("checkpoint.dir=${oc.env:NOPE}/ck", "Environment variable 'NOPE' not found"),
    ("checkpoint.writer.workers=1000", "from 1 to 128, got 1000"),
    ("train.step=3", "Did you mean train.steps=3?"),
    ("steps=3", "Did you mean train.steps=3?"),
    ("lr=1", "Did you mean train.lr=1?"),
    ("trian.lr=1", "Did you mean train.lr=1?"),
    ("xyz=1", "The keys of the config: train, data,"),
    ("model=gpt_mano", "Did you mean model=gpt_nano?"),
    ("+model=gpt_tiny", "Did you mean model=gpt_tiny?"),
    ("train.lr=fast", "train.lr must be a number, got fast."),
    ("recipe=cpu_quick", "Did you mean +recipe=cpu_quick?"),
    ("+recipe=cpu_quik", "Did you mean +recipe=cpu_quick?"),
    ("+recipe=cpu_quick", None),
    ("~checkpoint", "checkpoint=async_persistent"),
    ("--checkpoint=sync", "Did you mean checkpoint=sync?"),
    ("--checkpoint sync", "Did you mean checkpoint=sync?"),
    ("-checkpoint=sync", "Did you mean checkpoint=sync?"),
    ("foo", "'foo' is not of the form key=value"),
]

BENCH: list[tuple[str, str | None]] = [
    ("state=larg", "Did you mean state=large?"),
    ("rows=our", "Did you mean rows=ours?"),
    ("rows=xyz", "rows must be "),
    ("target=ram", "target must be disk or tmpfs, got ram."),
    ("device=cudo", "device must be cpu or cuda, got cudo."),
    ("repeats=0", "repeats must be at least 1, got 0"),
    ("repeat=3", "Did you mean repeats=3?"),
    ("action=chek", "Did you mean action=check?"),
    ("chek", "has no action 'chek'; did you mean ckpt-bench check?"),
    ("state=[]", "state is empty"),
    ("budget=15m", None),
    ("budget=null", None),
    ("budget=0", "budget must be a finite number above 0, got 0"),
    ("row_timeout=15m", None),
    ("row_timeout=soon", "90s, 30m, 2h; got soon."),
    ("'dir=$NOPE'", "the environment variable NOPE is not set"),
    ("--state=tiny", "Did you mean state=tiny?"),
]

CKPT = [
    ("ls . --jsn", "ckpt ls does not take '--jsn'; did you mean --json?"),
    ("tune . --size 10", "type a unit, such as --size=4GB"),
    ("tune . --size 4XB", "500MB (MB = 1e6)"),
    ("tune . --size=-4GB", "--size=-4GB is too little to measure"),
    ("tune . --seconds 0", "--seconds=0 must be above 0"),
    ("tune . --state larg", "Did you mean --state=large?"),
    ("tune . --writers dpc", "Did you mean checkpoint/writer=dcp?"),
    ("tune nowhere", "nowhere is not a folder"),
    ("tune '$NOPE/x'", "the environment variable NOPE is not set"),
    ("tune . --override workers=3", "must be like checkpoint.writer.checksum=auto"),
    ("tune . --override checkpoint.writer.worker=3", "Did you mean checkpoint.writer.workers=3?"),
]


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    in_turn(ANY_APP, 4),
)
def test_in_every_app(ask: Ask, line: str, words: str | None) -> None:
    """The answer has the words that help, and what it suggests works when it is typed."""
    text = ask(shlex.split(line))
    if words is None:
        assert text is None
        return
    assert text is not None, f"{line} was accepted in silence"
    assert words in text and "\n" not in text
    for suggestion in suggestions(text):
        kept = [word for word in shlex.split(line) if word.startswith("checkpoint=") and suggestion[:11] != word[:11]]
        again = ask([*kept, *shlex.split(suggestion)])
        assert again is None, f"{line} -> {text} -> {suggestion} -> {again}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_own_app", "line"),
    in_turn(
        product(
            [True, False],
            ["checkpoint=null", "+checkpoint=sync", "stager=pinned", "checkpoint = sync", "checkpoint=synk"],
        ),
        3,
    ),
)
def test_the_answer_comes_first_and_alone(
    conf: Path, in_own_app: bool, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    @override_hints()
    def app() -> None:
        hydra.main(config_path=str(conf), config_name="config", **HYDRA)(lambda config: None)()

    text = answered(app if in_own_app else ckpt_train, line, monkeypatch, capsys)
    assert "Did you mean checkpoint" in text or "checkpoint=off" in text


def test_other_apps_keep_hydras_words_before_and_after_ours_were_asked_for(conf: Path, ask: Ask) -> None:
    def asked_without_hints() -> str:
        with initialize_config_dir(str(conf), **HYDRA), pytest.raises(HydraException) as caught:
            compose("config", ["checkpoint=synk"])
        return str(caught.value)

    before = asked_without_hints()
    assert "Could not find 'checkpoint/synk'" in before and "Did you mean" not in before
    assert "Did you mean checkpoint=sync?" in (ask(["checkpoint=synk"]) or "")
    assert asked_without_hints() == before


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "line", "words"),
    in_turn([(ckpt_train, *row) for row in TRAIN] + [(bench_app.main, *row) for row in BENCH], 2),
    ids=lambda value: getattr(value, "__module__", None),
)
def test_to_our_commands(
    entry: Callable[[], None], line: str, words: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    if words is None:
        assert typed(entry, line, monkeypatch, capsys) is None
    else:
        assert words in answered(entry, line, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), CKPT)
def test_to_ckpt(line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert words in answered(ckpt, line, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "overrides", "words"),
    [
        ("synk", [], "Did you mean checkpoint=sync?"),
        ("sync", "checkpoint.dir=x", "overrides must be a list"),
        ("sync", {"checkpoint.keep.last": 2}, "such as ['checkpoint.keep.last=2'], not a dict"),
        ("sync", ["checkpoint.dir=x"], "checkpoint.dir=x and dir='ck' both name the folder. Leave out one of them."),
        ("asyn", [], "Did you mean checkpoint=async_persistent?"),
        ("sync", ["writer=dcp"], "Did you mean checkpoint/writer=dcp?"),
        ("sync", ["lr=1"], "no key lr"),
        ("sync", ["workers=2"], "Did you mean checkpoint.writer.workers=2?"),
        ("sync", ["checkpoint.max_stall_s=3"], "Use checkpoint=async_persistent, or checkpoint.max_stall_s=null."),
        ("sync", ["checkpoint", "=", "sync"], "no spaces around ="),
        ("async_persistent", ["checkpoint/stager=none"], "Use checkpoint/caller=inline"),
        (None, [], "not NoneType"),
        (3, [], "not int"),
        ({}, [], "Start from a preset, checkpoint=async_persistent"),
        ({"checkpoint": {}, "lr": 1}, [], "build_manager(cfg.checkpoint)"),
        (SYNC, ["writer=dcp"], "Did you mean checkpoint/writer=dcp?"),
        (SYNC, ["lr=1"], "There is no key lr."),
        (SYNC, ["checkpoint=off"], "pass 'off' as the config"),
        (SYNC, ["checkpoint/stagr=pinned"], "Did you mean checkpoint/stager=pinned?"),
        (SYNC, ["~checkpoint.dir"], "cannot be deleted"),
    ],
)
def test_to_build_manager(config: Any, overrides: Any, words: str) -> None:
    config = resolve_once("sync") if config is SYNC else config  # not when all tests are collected
    with pytest.raises(CheckpointConfigError) as caught:
        build_manager(config, overrides, dir="ck").close()
    assert words in str(caught.value) and "\n" not in str(caught.value)
    ends_at_the_call(caught.value)


def ends_at_the_call(error: BaseException) -> None:
    """A script shows its own line and one of ours, and nothing of Hydra: what is to be typed is the last line."""
    shown = "".join(traceback.format_exception(error)).splitlines()
    files = [line for line in shown if line.startswith("  File ")]
    assert len(files) == 2 and str(Path(__file__)) in files[0] and str(error) in shown[-1], shown
    assert not any("/hydra/" in line.replace("/config/hydra/", "/") or "omegaconf" in line for line in files), shown


#: One for each place that refuses: what is typed, its parser, Hydra, OmegaConf, the schema, the rules, a part.
REFUSED = (
    "checkpoint.keep=2",
    "checkpoint.save.every_steps",
    "checkpoint/stager=pined",
    "checkpoint.keep.last=[1",
    "checkpoint.keep.last=two",
    "checkpoint.dir=${nope}",
    "checkpoint.timeouts.write=5 parsecs",
    "checkpoint.stager.arenas=0",
    "checkpoint/stager=none",
    "checkpoint.enabled=perhaps",
    "checkpoint.writer._target_=nowhere.Writer",
)


@pytest.mark.parametrize("build", [build_manager, build_checkpointer])
def test_a_refusal_ends_the_traceback_at_the_call(build: Callable[..., Any]) -> None:
    for override in REFUSED:
        with pytest.raises(CheckpointConfigError) as caught:
            build("async_persistent", [override]).close()
        if override.endswith("nowhere.Writer"):  # the cause is an error of the user's module, and has its traceback
            assert isinstance(caught.value.__cause__, ModuleNotFoundError)
            caught.value.__cause__ = None
        ends_at_the_call(caught.value)


@pytest.mark.slow
def test_a_script_shows_six_lines_of_a_refusal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from ckpt_component import build_manager\n"
        "with build_manager('async_persistent', ['checkpoint.keep=2'], dir='runs') as manager:\n"
        "    pass\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stderr.splitlines() if line.strip("^~ ")]  # not the marks below a line of code
    assert done.returncode == 1 and len(lines) == 6, done.stderr
    assert lines[1].startswith(f'  File "{script}", line 2')
    assert lines[-1].endswith("checkpoint.keep cannot itself be 2. Did you mean checkpoint.keep.last=2?")


@pytest.mark.parametrize(
    ("typed", "words"),
    [("checkpoint.dir=~/ck", "'checkpoint.dir=\"~/ck\"'"), ("checkpoint.dir=$NOPE/ck", "NOPE is not set")],
)
def test_as_the_folder_in_an_override(typed: str, words: str) -> None:
    with pytest.raises(CheckpointConfigError, match=re.escape(words)):
        build_manager("sync", [typed])


@pytest.mark.parametrize(
    ("dir", "words"),
    [("", "checkpoint.dir is empty"), ("ftp://b/c", "no folder and no bucket"), ("$NOPE", "NOPE is not set")],
)
def test_as_the_folder(dir: str, words: str) -> None:
    with pytest.raises(CheckpointConfigError, match=re.escape(words)):
        build_manager("sync", dir=dir)


def test_as_arguments_in_the_wrong_order_or_of_the_wrong_type(tmp_path: Path) -> None:
    state: Any = {"weight": torch.ones(2)}
    path: Any = tmp_path / "one"
    one: Any = 1
    text_of_no_path = "{} is 1, not a path such as {}='runs/one'."
    no_state = f"Expected a state dict, got a {type(path).__name__}; give one such as "
    with build_manager("sync", dir=path) as manager, build_checkpointer("sync") as checkpointer:
        with pytest.raises(CheckpointError, match=no_state):
            manager.restore(path)  # where nothing is saved yet
        manager.save(1, state)
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: manager.save(state, one), "The step comes first: save(step, state)."),
            (lambda: checkpointer.save(path, state), "The state comes first: save(state, path)."),
            (lambda: manager.restore(path), no_state),
            (lambda: checkpointer.load(one), text_of_no_path.format("path", "path")),
            (lambda: load_weights(torch.nn.Linear(2, 2), one), text_of_no_path.format("path", "path")),
            (lambda: build_manager("sync", dir=one), text_of_no_path.format("dir", "dir")),
            (
                lambda: build_manager("sync", "runs/x"),
                "overrides must be a list, not 'runs/x'; for a folder, type dir='runs/x'.",
            ),
            (
                lambda: load_weights({"model": torch.nn.Linear(2, 2)}, path),
                "load_weights() fills one module; pass the ",
            ),
            (lambda: checkpointer.load(f"{path}@1"), f"There is no checkpoint at {path}@1 (@ is for ckpt and load_we"),
        ]
        for call, text in calls:
            with pytest.raises(CheckpointError) as caught:
                call()
            assert str(caught.value).startswith(text)


@pytest.mark.slow
@pytest.mark.parametrize("by_argument", [True, False])
@pytest.mark.parametrize(
    ("folder", "meant"), [("~/ck", "home/ck"), ("$HOME/ck", "home/ck"), ("${HOME}_2/ck", "home_2/ck")]
)
def test_home_is_the_home_folder(tmp_path: Path, folder: str, meant: str, by_argument: bool) -> None:
    config = {**resolved(), "dir": "x" if by_argument or "{" in folder else folder}
    with build_manager(config, dir=folder if by_argument or "{" in folder else None) as manager:
        manager.save(1, {"step": 1})
    assert (tmp_path / meant / "iter_0000001").is_dir() and "~" not in os.listdir(tmp_path)


def resolved() -> dict[str, Any]:
    """A config as a dict."""
    from dataclasses import asdict

    return {**asdict(resolve_config("sync")), **{"naming": "megatron", "overlap": "wait", "on_error": "raise"}}


def suggestions(text: str) -> list[str]:
    """What a text says to type; "..." stands for the user's own value."""
    quoted = re.findall(r"""'checkpoint[\w.]*="[^"]+"'""", text)
    found = re.search(r"Did you mean |Use |use a slash: |with dots: |type |name a folder: |null instead, .*: |$", text)
    assert found is not None
    advice = text[found.end() :]
    plain = re.findall(r"\+?\b(?:checkpoint|recipe)[\w./]*=(?:\[[^\]]*\]|[\w.]+)", advice.split(" can be:")[0])
    return quoted or [item.rstrip(".") for item in plain if "..." not in item]


def test_looking_for_a_better_text_never_stops_an_app(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("config_name")

    monkeypatch.setattr("ckpt_component.config.hydra.hints.what_was_meant", broken)
    assert ask(["checkpoint=sync"]) is None
    assert "synk" in (ask(["checkpoint=synk"]) or "")
    assert "could not look for a better text than Hydra's: KeyError('config_name')" in caplog.text
