"""The built wheel in an environment of its own, used from a folder outside of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import ckpt_component

CHECKOUT = Path(ckpt_component.__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHECKOUT / "pyproject.toml").is_file(), reason="needs the checkout, to build from it"),
]


def run(*words: object, cwd: Path) -> str:
    # PYTHONPATH would let the checkout in by the back door.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution, as it is for a release."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, CHECKOUT, cwd=folder)
    version = ckpt_component.__version__
    assert sorted(path.name for path in folder.iterdir()) == [
        f"ckpt_component-{version}-py3-none-any.whl",
        f"ckpt_component-{version}.tar.gz",
    ]
    return folder / f"ckpt_component-{version}-py3-none-any.whl"


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and behind it the libraries of this environment but not the checkout."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A folder that a .pth file names is searched, and the .pth files in it, such as an editable install's, are not read.
    libraries = [path for path in sys.path if path.endswith("-packages")]
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        site,
        wheel,
        cwd=home,
    )
    (site / "libraries.pth").write_text("\n".join(libraries))
    return home / "bin" / "python"


def test_it_holds_the_package_the_configs_and_the_plugin(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder, inside in (
        ("ckpt_component", "ckpt_component"),
        ("conf", "ckpt_component/conf"),
        ("recipes", "ckpt_component/recipes"),
    ):
        here = [path for path in (CHECKOUT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".typed")]
        assert here
        missing = {f"{inside}/{path.relative_to(CHECKOUT / folder)}" for path in here} - {*names}
        assert missing <= {"ckpt_component/_hydra_searchpath.py"}  # it is the plugin
    assert "hydra_plugins/ckpt_component_searchpath.py" in names
    others = {name.split("/")[0] for name in names} - {"ckpt_component", "hydra_plugins"}
    assert sorted(name.split(".")[-1] for name in others) == ["ckpt_bench", "ckpt_train", "dist-info"]


def test_a_script_imports_the_wheel_and_composes_its_presets(python: Path, tmp_path: Path) -> None:
    presets = sorted(path.stem for path in (CHECKOUT / "conf" / "checkpoint").glob("*.yaml"))
    code = f"""
import ckpt_component, ckpt_component.config as c
print(ckpt_component.__file__, c.config_dir(), c.recipe_dir(), sep="\\n")
for name in {presets}:
    print(c.resolve_config(name).stager)
"""
    lines = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert all(Path(path).is_relative_to(python.parent.parent) for path in lines[:3])
    assert len(lines) == 3 + len(presets)


def test_presets_and_recipes_compose_in_an_app(python: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "from ckpt_component.config import resolve_config\n"
        "version = {'version_base': '1.3'} if hydra.__version__ < '1.4' else {}\n"
        "@hydra.main(config_path=None, config_name='config', **version)\n"
        "def main(config):\n"
        "    print('job', resolve_config(config.checkpoint).dir)\n"
        "main()\n"
    )
    words = ["hydra.run.dir=.", "hydra.output_subdir=null"]
    (tmp_path / "config.yaml").write_text("defaults: [checkpoint: sync, _self_]\n")
    at_home = [python, "app.py", "--config-dir", "."]
    assert run(*at_home, "checkpoint=async_zero_overhead", *words, cwd=tmp_path) == "job checkpoints\n"
    shown = run(*at_home, "--info", "searchpath", cwd=tmp_path)
    assert f"file://{python.parent.parent}" in shown
    help_text = run(*at_home, "--help", cwd=tmp_path)
    groups = dict(line.split(": ") for line in help_text.splitlines() if line.startswith(("recipe: ", "checkpoint: ")))
    assert groups["recipe"].split(", ") == sorted(path.stem for path in (CHECKOUT / "recipes").glob("*.yaml"))
    # What is for our own commands alone is not in other apps.
    assert "gpt_nano" not in help_text and "cpu_quick" not in help_text


def test_the_training_job_has_its_config_and_its_recipes(python: Path, tmp_path: Path) -> None:
    assert "checkpoint:" in run(python, "-m", "ckpt_component.train", "--cfg", "job", cwd=tmp_path)
    # Those that override /hydra/ need a launcher or sweeper of another package.
    paths = [path for path in (CHECKOUT / "recipes").rglob("*.yaml") if "override /hydra/" not in path.read_text()]
    names = sorted(path.stem for path in paths)
    code = f"""
import hydra
from ckpt_component.config import config_dir
from ckpt_train.schema import register
register()
version = {{'version_base': '1.3'}} if hydra.__version__ < '1.4' else {{}}
with hydra.initialize_config_dir(str(config_dir()), **version):
    for name in {names}:
        print(name, hydra.compose("train", ["+recipe=" + name]).checkpoint._target_)
"""
    lines = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert lines == [f"{name} ckpt_component.instantiate_manager" for name in names]
