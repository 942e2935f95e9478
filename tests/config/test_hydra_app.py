"""A Hydra app in another folder: presets, parts, sweeps and errors come with the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import hydra
import pytest
from programs import run_program

from ckpt_component.config import recipe_dir

HYDRA_1_3 = hydra.__version__ < "1.4"
PRESETS = ["async_persistent", "async_temporal", "async_zero_overhead", "off", "sync"]

APP = """
import sys
from pathlib import Path

import hydra


@hydra.main(config_path="conf", config_name="config"{version})
def main(config):
    from ckpt_component.config import build_part, compose_checkpoint, resolve_config

    checkpoint = resolve_config(config.checkpoint)
    inside = compose_checkpoint("sync", ["checkpoint.writer.workers=5"])
    if checkpoint.stager["_target_"].startswith("my_"):
        from my_stagers import Base

        checkpoint.stager = build_part("stager", checkpoint.stager, Base)
        checkpoint.stager = vars(checkpoint.stager)
    print("job", checkpoint.dir, checkpoint.stager, checkpoint.writer["workers"], inside.writer.workers)
    print("recovery", checkpoint.recovery.mode, checkpoint.recovery.every_steps)
    print("torch" in sys.modules)


if __name__ == "__main__":
    {call}
"""
HINTING = """
    from ckpt_component.config import override_hints
    with override_hints():
        main()
"""


@pytest.fixture(scope="module", autouse=True)
def package_is_installed() -> None:
    """Without an installation Hydra cannot find the plugin, and every test here would fail for that alone."""
    assert entry_points(group="hydra.plugins", name="ckpt_component"), "run: pip install -e '.[test]'"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An app of a user's, with a stager of their own by one file."""
    version = ', version_base="1.3"' if HYDRA_1_3 else ""
    (tmp_path / "app.py").write_text(APP.format(version=version, call="main()"))
    (tmp_path / "hinting_app.py").write_text(APP.format(version=version, call=HINTING.strip()))
    (tmp_path / "my_stagers.py").write_text(
        "class Base: ...\n"
        "class Mine(Base):\n"
        "    def __init__(self, foo: int = 1, bar: list = ()):\n"
        "        self.foo, self.bar = foo, bar\n"
    )
    own = tmp_path / "conf" / "checkpoint" / "stager"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("_target_: my_stagers.Mine\nfoo: 3\nbar: [1, 2]\n")
    (own / "lost.yaml").write_text("_target_: my_stagrs.Mine\n")
    (tmp_path / "conf" / "config.yaml").write_text(
        "defaults: [checkpoint: async_persistent, _self_]\nlr: 1.0\nhydra: {run: {dir: out}, sweep: {dir: sweep}}\n"
    )
    return tmp_path


def run(app: Path, *words: str, script: str = "app.py") -> subprocess.CompletedProcess[str]:
    return run_program([script, *words], app, {"PYTHONPATH": str(app)}, apart=True)


def run_afresh(app: Path, *words: str, script: str = "app.py") -> subprocess.CompletedProcess[str]:
    """As `run`, in an interpreter that has nothing loaded."""
    return subprocess.run(
        [sys.executable, script, *words],
        cwd=app,
        env={**os.environ, "PYTHONPATH": str(app)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def refused(app: Path, *words: str, script: str = "app.py") -> str:
    """What the app says before it ends with exit code 1; without a traceback."""
    done = run(app, *words, script=script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "job" not in done.stdout
    # Hydra 1.4 shows the job's own frames above any error that the job raises.
    assert "Traceback" not in done.stderr or not HYDRA_1_3, done.stderr
    return done.stderr


@pytest.mark.slow
def test_the_package_brings_the_presets(app: Path) -> None:
    done = run_afresh(app)
    assert done.returncode == 0, done.stderr
    assert "job checkpoints {'_target_': 'ckpt_component.stagers.SharedMemoryStager', 'arenas': 1} 2 5" in done.stdout
    assert done.stdout.endswith("False\n"), "a config needs no torch"
    assert done.stderr == ""


@pytest.mark.slow
def test_presets_parts_and_values_are_chosen_together(app: Path) -> None:
    words = [
        "checkpoint=sync",
        "checkpoint/stager=pinned",
        "checkpoint.writer.workers=4",
        "checkpoint.dir=${lr}",
    ]
    assert "job 1.0 {'_target_': 'ckpt_component.stagers.PinnedStager', 'arenas': 1} 4 5" in run(app, *words).stdout


def test_a_part_of_the_users_is_one_file(app: Path) -> None:
    assert (
        "job checkpoints {'foo': 4, 'bar': [1, 2]} 2 5"
        in run(app, "checkpoint/stager=mine", "checkpoint.stager.foo=4").stdout
    )


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_sweep_goes_over_parts_and_values(app: Path) -> None:
    done = run(app, "-m", "checkpoint.writer.workers=1,2,4", "checkpoint/stager=pinned,shared_memory,mine")
    assert done.returncode == 0, done.stderr
    jobs = [line for line in done.stdout.splitlines() if line.startswith("job")]
    assert len(set(jobs)) == 9


@pytest.mark.slow
def test_a_sweep_goes_over_a_group_of_keys(app: Path) -> None:
    done = run(app, "-m", "checkpoint/recovery=none,host", "checkpoint.recovery.every_steps=5")
    assert [line for line in done.stdout.splitlines() if line.startswith("recovery")] == [
        "recovery none 5",
        "recovery host 5",
    ]


@pytest.mark.slow
def test_glob_finds_our_parts_and_the_users(app: Path) -> None:
    done = run(app, "-m", "checkpoint/stager=glob(*,exclude=lost)")
    assert done.stdout.count("job checkpoints") == 5


@pytest.mark.slow
def test_help_lists_our_groups_without_the_schemas(app: Path) -> None:
    text = run(app, "--help").stdout
    assert f"checkpoint: {', '.join(PRESETS)}" in text
    assert "checkpoint/stager: lost, mine, none, pinned, shared_memory, zero_overhead" in text
    assert "checkpoint/recovery: host, none, peers" in text
    assert "checkpoint/writer: dcp, safetensors, torch_save" in text


def test_the_search_path_shows_us_last(app: Path) -> None:
    text = run(app, "--info", "searchpath").stdout
    assert text.index("main ") < text.index("ckpt-component ")
    assert text.count("ckpt-component") == 1


def test_our_plugin_is_quick(app: Path) -> None:
    (line,) = [
        line
        for line in run_afresh(app, "--info", "plugins").stdout.splitlines()
        if "hydra_plugins.ckpt_component_searchpath" in line
    ]
    assert float(line.split("|")[2]) < 1.0  # 0.03 s on an idle machine; a torch import takes 3


@pytest.mark.slow
def test_an_app_without_our_group_can_add_it(app: Path) -> None:
    (app / "conf" / "config.yaml").write_text("lr: 1.0\n")
    assert "job" in run(app, "+checkpoint=async_temporal").stdout


@pytest.mark.slow
def test_an_app_may_put_it_elsewhere(app: Path) -> None:
    (app / "conf" / "config.yaml").write_text("defaults: [checkpoint@train.ckpt: sync]\n")
    script = (app / "app.py").read_text().replace("config.checkpoint", "config.train.ckpt")
    (app / "app.py").write_text(script)
    assert "PinnedStager" in run(app, "checkpoint/stager@train.ckpt.stager=pinned").stdout


def test_hydra_speaks_for_itself_in_an_app_that_does_not_ask_for_hints(app: Path) -> None:
    assert "Could not override 'checkpoint.nmaing'" in refused(app, "checkpoint.nmaing=step")
    assert "Could not find 'checkpoint/async_persistant'" in refused(app, "checkpoint=async_persistant")


@pytest.mark.slow
def test_a_mistyped_recipe_lists_the_recipes(app: Path) -> None:
    names = sorted(path.stem for path in recipe_dir().glob("*.yaml"))
    text = refused(app, "+recipe=no_such_recipe", script="hinting_app.py")
    assert "There is no recipe=no_such_recipe." in text
    assert all(name in text for name in names)


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("checkpoint.overlap=thread", ["checkpoint.overlap must be wait, skip or error, got thread."]),
        (
            "checkpoint.stager=pinned",
            ["checkpoint.stager='pinned' sets a string; to choose a component use a slash: checkpoint/stager=pinned"],
        ),
        (
            "+checkpoint.stager.arena=3",
            ["There is no key checkpoint.stager.arena. Did you mean checkpoint.stager.arenas?"],
        ),
        (
            "+checkpoint.stager.device_buffer_bytes=0",
            ["checkpoint.stager.device_buffer_bytes was removed, because", "leave it out."],
        ),
        ("+checkpoint.nmaing=step", ["There is no key checkpoint.nmaing. Did you mean checkpoint.naming?"]),
        ("checkpoint.writer.workers=0", ["checkpoint.writer.workers must be from 1 to 128, got 0."]),
        ("checkpoint.dir=???", ["checkpoint.dir is missing; give it a value: checkpoint.dir=..."]),
        (
            "checkpoint.resume=nevr",
            [
                "checkpoint.resume must be auto, must, never, best, a step or a path, got nevr. Did you mean checkpoint.resume=never?"
            ],
        ),
        (
            "checkpoint/stager=lost",
            ["checkpoint.stager._target_=my_stagrs.Mine cannot be imported: there is no module my_stagrs."],
        ),
    ],
)
def test_what_hydra_accepts_is_refused_in_words_when_the_job_reads_its_config(
    app: Path, word: str, texts: list[str]
) -> None:
    text = refused(app, word)
    for expected in texts:
        assert expected in text


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "hint"),
    [
        (
            "checkpoint=async_persistant",
            "There is no checkpoint=async_persistant. Did you mean checkpoint=async_persistent? checkpoint can be: "
            + ", ".join(PRESETS)
            + ".",
        ),
        (
            "checkpoint/stagr=pinned",
            "There is no group checkpoint/stagr. Did you mean checkpoint/stager=pinned?",
        ),
        (
            "checkpoint.stager.arena=3",
            "There is no key checkpoint.stager.arena. Did you mean checkpoint.stager.arenas=3?",
        ),
        (
            "checkpoint.dir=/a=b",
            "checkpoint.dir=/a=b cannot be read (mismatched input '=' expecting <EOF>). A value with special characters "
            "needs quotes, in the shell two pairs of them: 'checkpoint.dir=\"/a=b\"'.",
        ),
        (
            "checkpoint.recovery=host",
            "checkpoint.recovery='host' sets a string; to choose a component use a slash: checkpoint/recovery=host",
        ),
        ("ler=0.1", "There is no key ler. Did you mean lr=0.1?"),
        ("workers=3", "There is no key workers. Did you mean checkpoint.writer.workers=3?"),
        ("hydra.rnu.dir=x", "There is no key hydra.rnu.dir. Did you mean hydra.run.dir=x?"),
        ("hydra.sweep.dri=x", "There is no key hydra.sweep.dri. Did you mean hydra.sweep.dir=x?"),
        ("sweep.resume=x", "There is no key sweep.resume. Did you mean hydra.sweep.dir=x?"),
        ("sweep.dir=x", "There is no key sweep.dir. Did you mean hydra.sweep.dir=x?"),
    ],
)
def test_an_app_that_hints_says_what_was_meant(app: Path, word: str, hint: str) -> None:
    assert refused(app, word, script="hinting_app.py").splitlines()[0] == hint


@pytest.mark.slow
@pytest.mark.parametrize("word", ["hydra/job_loging=none", "hydra.job.chdir=maybe"])
def test_of_its_own_groups_and_values_hydra_speaks_alone(app: Path, word: str) -> None:
    text = refused(app, word, script="hinting_app.py")
    assert word.partition("=")[0] in text and "There is no" not in text


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["hydra.run.dir=elsewhere"],
        ["hydra/job_logging=disabled"],
        ["hydra.run.dir=elsewhere", "hydra.verbose=true"],
        ["--config-dir=more", "+recipe=mine"],  # a folder that the hint knows nothing of
    ],
)
def test_a_hint_is_for_the_override_that_was_refused(app: Path, words: list[str]) -> None:
    (app / "more" / "recipe").mkdir(parents=True)
    (app / "more" / "recipe" / "mine.yaml").write_text("# @package _global_\nlr: 2.0\n")
    text = refused(app, *words, "checkpoint.nmaing=step", script="hinting_app.py")
    hint = "There is no key checkpoint.nmaing. Did you mean checkpoint.naming=step?"
    assert text.splitlines()[0] == hint and text.count("There is no") == 1


FAILING = """
from hydra.errors import CompactHydraException
import hydra
from pathlib import Path

class Failed(CompactHydraException):
    pass

@hydra.main(config_path="conf", config_name="config"{version})
def main(config):
    if config.lr == 2:
        config.no_such_key
    raise Failed("it is over: lr, hydra.run.dir, none")

if __name__ == "__main__":
    {call}
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["lr=1.0", "lr=2", "+none=1"])
def test_a_job_that_fails_gets_no_hint(app: Path, word: str) -> None:
    version = ', version_base="1.3"' if HYDRA_1_3 else ""
    (app / "failing_app.py").write_text(FAILING.format(version=version, call=HINTING.strip()))
    done = run(app, "hydra.run.dir=elsewhere", word, script="failing_app.py")
    assert done.returncode == 1 and "There is no" not in done.stderr
    assert ("no_such_key" if word == "lr=2" else "it is over") in done.stderr


@pytest.mark.slow
def test_hints_are_silent_otherwise(app: Path) -> None:
    assert run_afresh(app, script="hinting_app.py").stderr == ""
    text = refused(app, "checkpoint.stager=pinned", script="hinting_app.py")
    assert text.count("='pinned' sets a string") == 1
