"""README and docs: their commands and Python blocks run, their links lead somewhere, their tables follow the code."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckpt_component

REPOSITORY = Path(ckpt_component.__file__).resolve().parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((REPOSITORY / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code of a page; `mark` is what follows the language: `notest: why`, `slow` or `soak`."""

    page: str
    language: str
    mark: str
    code: str


def blocks(language: str) -> list[Block]:
    return [
        Block(page.name, *(text.strip() for text in match))
        for page in PAGES
        for match in FENCE.findall(page.read_text())
        if match[0] == language
    ]


def environment(folder: Path) -> dict[str, str]:
    """Commands of this environment, found by their names, on CPU threads that do not spin."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(folder),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


SCRIPTS = {
    page.name: "\n".join(
        block.code for block in blocks("python") if block.page == page.name and "notest" not in block.mark
    )
    for page in PAGES
}


@pytest.mark.parametrize("page", [page for page, script in SCRIPTS.items() if script and page != "README.md"])
def test_python_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[page])
    run("python script.py", tmp_path)


def test_the_script_of_the_readme_logs_what_it_shows_and_resumes(tmp_path: Path) -> None:
    (script,) = [block.code for block in blocks("python") if block.page == "README.md"]
    (tmp_path / "train.py").write_text(script)
    first = run("python train.py", tmp_path)
    for line in ("starting from scratch", "iter_0000050 staged", "iter_0000050 written", "iter_0000050 committed"):
        assert line in first
    assert "epoch 2, checkpoints of steps [100, 150, 200]" in first
    (tmp_path / "train.py").write_text(script.replace("201", "301"))
    assert "restored step 200 from" in run("python train.py", tmp_path)


@pytest.mark.slow
def test_a_killed_tutorial_ends_like_one_that_was_not(tmp_path: Path) -> None:
    script = next(block.code for block in blocks("python") if block.page == "tutorial.md")
    (tmp_path / "tutorial.py").write_text(script)
    whole = run("python tutorial.py; mv checkpoints uninterrupted", tmp_path)
    killed = run("KILL_AT=130 python tutorial.py || echo killed; python tutorial.py", tmp_path)
    assert "killed" in killed and "restored step 120" in killed
    assert whole.splitlines()[0] == killed.splitlines()[1].removeprefix("killed") != ""


def commands() -> list[Any]:
    """Blocks of commands, without those that set up environments; those that take a minute have the soak marker."""
    return [
        pytest.param(block, marks=[pytest.mark.soak] if block.mark == "soak" else [])
        for block in blocks("bash")
        if "notest" not in block.mark and "pip install" not in block.code and "tutorial.py" not in block.code
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("block", commands())
def test_commands_run(block: Block, tmp_path: Path) -> None:
    for command in block.code.splitlines():
        if command.startswith("ckpt-train"):
            command += " train.steps=6 model=gpt_nano train.eval_every=null checkpoint.save.every_steps=3"
        run(command, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([\w./-]*)(#[\w-]+)?\)", text):
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor[1:] in slugs, f"{page.name} links to {target}{anchor}"


def test_the_page_of_keys_is_current() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs" / "configuration.py"))["page"]()
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == page, "run python docs/configuration.py"


def test_the_page_of_symbols_has_all_public_names() -> None:
    text = (REPOSITORY / "docs" / "api.md").read_text()
    assert [name for name in ckpt_component.__all__ if name not in text] == []


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_pages_name_exist(page: Path) -> None:
    for path in re.findall(r"\btests/[\w/]+\.\w+", page.read_text()):
        assert (REPOSITORY / path).exists(), f"{page.name} names {path}"
