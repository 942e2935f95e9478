"""README and docs: their commands and Python blocks run, their links lead somewhere, their tables follow the code."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ckpt_bench.measure.row_kinds import ROWS
from ckpt_bench.schema import STATES, Bench
from programs import run_program
from strides import STRIDE_OFFSET

import ckpt_component

DEFINED = re.compile(r"^def (test_\w+)", re.MULTILINE)
REPOSITORY = Path(ckpt_component.__file__).resolve().parents[1]
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((REPOSITORY / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A block of text right after one of commands is what the commands print; its line `...` stands for any lines.
OUTPUT = re.compile(r"\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What differs from run to run and from machine to machine.
VARYING = {
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d": "DATE",
    r"\.ckpt-quarantine[^\s)]*\)?": "QUARANTINED",
    r"\b\d+(\.\d+)? (bytes|[kMGT]B)\b": "SIZE",
    r"\b\d+(\.\d+)? (ms|s|min|h|days?)\b": "TIME",
    r"[ \t]+": " ",
}
#: The most words of all pages of docs together.
WORDS = 27_000
#: Pages whose commands tests of their own run, to compare what they print with what the page says.
SHOWN = ("README.md", "tutorial.md")
#: The page whose commands work on what its Python blocks leave.
PREPARED = "ckpt.md"
#: Overrides of `ckpt-train` that change nothing of what its commands show but the time they take.
SMALL = "model=gpt_nano model.context=16 train.batch_size=2 train.eval_every=null"


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        page: the name of the page
        language: of the block
        mark: what follows the language: `notest: why`, `slow` or `soak`
        code: the block
        output: the block of text right after it; None: there is none
    """

    page: str
    language: str
    mark: str
    code: str
    output: str | None = None

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("notest")


def blocks(language: str = "") -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if language in ("", match[1]):
                output = OUTPUT.match(text, match.end())
                word, mark, code = map(str.strip, match.groups())
                found.append(Block(page.name, word, mark, code, output[1] if output else None))
    return found


def environment(folder: Path) -> dict[str, str]:
    """Commands of this environment, found by their names, on CPU threads that do not spin."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(folder),
        "COLUMNS": "100",  # pages have the lines of a wide terminal
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


def normalized(output: str, folder: Path) -> str:
    """Output without what varies, in the home folder of the pages, without empty lines."""
    output = output.replace(str(folder), "/home/me").replace(f" on {socket.gethostname()},", " on vm,")
    for pattern, name in VARYING.items():
        output = re.sub(pattern, name, output)
    return "".join(f"{line.strip()}\n" for line in output.splitlines() if line.strip())


def shows(page: str, printed: str) -> bool:
    """Whether a page shows what was printed, both normalized."""
    lines = ["(?:.*\n)*?" if line == "..." else re.escape(f"{line}\n") for line in page.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


def run_script(name: str, folder: Path) -> str:
    """Run a script of blocks of Python; returns what it prints."""
    done = run_program([name], folder, environment(folder))
    assert done.returncode == 0, f"{name}\n{done.stdout[-4000:]}"
    return done.stdout


SCRIPTS = {
    page.name: "\n".join(block.code for block in blocks("python") if block.page == page.name and block.runs)
    for page in PAGES
}


#: What a plain `pytest` runs; each page takes an interpreter with torch.
QUICK_PAGES = {"tutorial.md"}


def _of_other_commits(number: int) -> list[pytest.MarkDecorator]:
    """Half of the other pages take their turn, by the commit; all do with the soak marker."""
    return [] if number % 2 == STRIDE_OFFSET % 2 else [pytest.mark.soak]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in QUICK_PAGES else [pytest.mark.slow, *_of_other_commits(number)])
        for number, (page, script) in enumerate(SCRIPTS.items())
        if script and page != "README.md"
    ],
)
def test_python_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    """After README's own, in one folder, as a reader types them."""
    for number, name in enumerate(["README.md", page]):
        (tmp_path / f"{number}.py").write_text(SCRIPTS[name])
        run_script(f"{number}.py", tmp_path)


def test_no_two_pages_save_to_one_folder() -> None:
    """Their states differ, so what one page leaves would be refused by the next."""
    pages: dict[str, set[str]] = {}
    for block in blocks("python"):
        for folder in re.findall(r'\bdir="([^"]+)"', block.code):
            pages.setdefault(folder, set()).add(block.page)
    assert {folder: names for folder, names in pages.items() if len(names) > 1} == {}
    assert len(pages) > 8


def test_the_script_of_the_readme_logs_what_it_shows_and_resumes(tmp_path: Path) -> None:
    (script,) = [block.code for block in blocks("python") if block.page == "README.md"]
    (tmp_path / "train.py").write_text(script)
    first = run_script("train.py", tmp_path)
    for line in ("starting from scratch", "iter_0000050 staged", "iter_0000050 written", "iter_0000050 committed"):
        assert line in first
    assert "epoch 2, checkpoints of steps [100, 150, 200]" in first
    (tmp_path / "train.py").write_text(script.replace("201", "301"))
    assert "restored step 200 from" in run_script("train.py", tmp_path)


@pytest.mark.soak
def test_a_killed_tutorial_ends_like_one_that_was_not(tmp_path: Path) -> None:
    script = next(block.code for block in blocks("python") if block.page == "tutorial.md")
    (tmp_path / "tutorial.py").write_text(script)
    whole = run("python tutorial.py; mv runs/tutorial runs/uninterrupted", tmp_path)
    killed = run("KILL_AT=130 python tutorial.py || echo killed; python tutorial.py", tmp_path)
    assert "killed" in killed and "restored step 120" in killed
    assert whole.splitlines()[0] == killed.splitlines()[1].removeprefix("killed") != ""
    assert whole.splitlines()[0] == run("python tutorial.py", tmp_path).splitlines()[0], "nothing is left to train"


@pytest.mark.turns(3)
@pytest.mark.slow
def test_the_contract_of_the_page_tests_the_stager_of_the_page(tmp_path: Path) -> None:
    script, contract = (
        next(block.code for block in blocks("python") if block.page == "extending.md" and text in block.code)
        for text in ("class TimedStager", "StagerContract")
    )
    (tmp_path / "my_app.py").write_text(script)
    (tmp_path / "test_my_app.py").write_text(contract)
    assert re.search(r"\d\d passed in", run("python -m pytest -q -p no:cacheprovider test_my_app.py", tmp_path))


def test_every_block_runs_or_says_why_not() -> None:
    for block in blocks():
        where = f"{block.page}: {block.code[:60]!r}"
        assert block.language in ("python", "bash", "yaml", "text"), where
        assert block.mark in ("", "slow", "soak") or len(block.mark.removeprefix("notest:").split()) > 1, (
            f"{where} gives no reason"
        )


def commands() -> list[Any]:
    """Blocks of commands; those that take a minute have the soak marker."""
    return [
        pytest.param(block, marks=[pytest.mark.soak] if block.mark == "soak" else [])
        for block in blocks("bash")
        if block.runs and block.page not in SHOWN
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Python of the page leaves, which its commands use."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "script.py").write_text(SCRIPTS[PREPARED])
    run_script("script.py", folder)
    return folder


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("block", commands())
def test_commands_run(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if block.page == PREPARED:
        shutil.copytree(request.getfixturevalue("prepared"), tmp_path, dirs_exist_ok=True)
    printed = ""
    for command in block.code.splitlines():
        if command.startswith("ckpt-train"):
            command += f" train.steps=6 checkpoint.save.every_steps=3 {SMALL}"
        printed += run(command, tmp_path)
    if block.output is not None:
        page, printed = normalized(block.output, tmp_path), normalized(printed, tmp_path)
        assert shows(page, printed), f"{block.page} shows\n{page}\nbut the commands print\n{printed}"


def test_a_page_that_shows_something_else_is_noticed() -> None:
    printed = normalized("ran 0.3 s on /tmp/x/runs\nwrote 12 bytes\n\nrename  atomic\n", Path("/tmp/x"))
    for page in (
        "ran 25 ms on /home/me/runs\nwrote 3.20 MB\nrename atomic\n",
        "...\nrename   atomic\n",
        "ran 1 h on /home/me/runs\n...\n",
    ):
        assert shows(normalized(page, Path("/tmp/x")), printed)
    for page in (
        "",
        "ran 25 ms on /home/me/runs\n",
        "...\nwrote 3.20 MB\n",
        "...\nrename loose\n",
        "ran 1 h on /home/you\n...\n",
    ):
        assert not shows(normalized(page, Path("/tmp/x")), printed)


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_commands_of_the_readme_run_beside_its_script(tmp_path: Path) -> None:
    """In one folder, as a reader types them: the runs must not meet each other's checkpoints."""
    (script,) = [block.code for block in blocks("python") if block.page == "README.md"]
    block, tools = [block for block in blocks("bash") if block.page == "README.md" and block.runs]
    (tmp_path / "train.py").write_text(script)
    run_script("train.py", tmp_path)
    assert "200  " in run(tools.code, tmp_path)
    assert (tmp_path / "runs" / "readme" / "events" / "run.html").exists()
    first, second, sweep = (f"{line} {SMALL}" for line in block.code.splitlines())
    assert "starting from scratch" in run(first, tmp_path)
    assert "restored step 60" in run(second, tmp_path)
    assert "rows with figures: 2 of 2" in run(sweep, tmp_path)


@pytest.mark.parametrize("word", ["checkpoint.writer.worker=4", "checkpoint/stager=pined", "checkpoint.stager=pinned"])
@pytest.mark.slow
def test_a_typo_is_refused_with_what_to_type(word: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="checkpoint/stager=pinned|checkpoint.writer.workers=4"):
        run(f"ckpt-train {word}", tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([\w./-]*)(#[\w-]+)?\)", text):
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor[1:] in anchors(path), f"{page.name} links to {target}{anchor}"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pages_that_messages_name_exist() -> None:
    named = {match for literal in literals() for match in re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", literal)}
    assert len(named) > 4
    for path, anchor in named:
        page = REPOSITORY / path
        assert page.exists(), f"a message names {path}"
        assert not anchor or anchor in anchors(page), f"a message names {path}#{anchor}"


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("configuration.py", "configuration.md"),
        ("layers.py", "design.md"),
        ("reliability.py", "reliability.md"),
        ("performance.py", "performance.md"),
    ],
)
def test_a_page_that_a_script_writes_is_current(script: str, page: str) -> None:
    written = runpy.run_path(str(REPOSITORY / "docs" / script))["page"]()
    assert (REPOSITORY / "docs" / page).read_text() == written, f"run python docs/{script}"


def test_the_page_of_symbols_has_all_public_names() -> None:
    text = (REPOSITORY / "docs" / "api.md").read_text()
    assert [name for name in ckpt_component.__all__ if name not in text] == []


def words_of(page: Path) -> int:
    return sum(bool(re.search(r"\w", word)) for word in page.read_text().split())


def test_the_readme_and_the_docs_are_short() -> None:
    """A page that is added takes the place of words that are less needed."""
    assert 600 < words_of(REPOSITORY / "README.md") <= 1000
    assert sum(map(words_of, (REPOSITORY / "docs").glob("*.md"))) <= WORDS
    assert words_of(REPOSITORY / "docs" / "ckpt.md") <= 1250  # --help is the reference


def test_the_map_and_the_site_have_every_page() -> None:
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"index.md"}
    assert pages - {*re.findall(r"\]\(([\w.]+)\)", (REPOSITORY / "docs" / "index.md").read_text())} == set()
    nav = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert pages - {*re.findall(r": ([\w.]+\.md)$", nav, re.MULTILINE)} == set()


def test_links_of_the_site_lead_to_its_pages() -> None:
    pages = runpy.run_path(str(REPOSITORY / "docs" / "site_pages.py"))["pages"]()
    for page, text in pages.items():
        for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", FENCE.sub("", text)):
            path = os.path.normpath(os.path.join(os.path.dirname(page), target))
            drawing = re.sub(r"\.(light|dark)\.svg$", ".svg", path)
            picture = path.startswith("pictures/") and (REPOSITORY / "docs" / drawing).exists()
            assert picture or path in pages, f"{page} links to {target}"
    reference = re.findall(r"^::: ckpt_component\.(\w+)$", pages["reference.md"], re.MULTILINE)
    assert sorted(reference) == sorted({*ckpt_component.__all__} - {"__version__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_pages_name_exist(page: Path) -> None:
    for path in re.findall(r"\btests/[\w/]+\.\w+", page.read_text()):
        assert (REPOSITORY / path).exists(), f"{page.name} names {path}"
    defined = {name for path in (REPOSITORY / "tests").rglob("test_*.py") for name in DEFINED.findall(path.read_text())}
    assert set(re.findall(r"`(test_\w+)`", page.read_text())) <= defined


def literals() -> list[str]:
    """All strings of the package, those between the values of an f-string too."""
    return [
        node.value
        for path in (REPOSITORY / "ckpt_component").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_messages_of_the_troubleshooting_table_are_those_of_the_code() -> None:
    """A quoted message has `...` in the place of each value, so what is between is literal in some text of the code."""
    known = [piece for literal in literals() for piece in re.split(r"%[a-z]|%\.\w+|\{\w*\}", literal)]
    table = (REPOSITORY / "docs" / "failures.md").read_text().partition("## Messages")[2]
    cells = [
        cell for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) if not re.search("of (Hydra|torch),", cell)
    ]
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell.partition(", such as")[0])]
    assert len(quotes) > 15
    for quote in quotes:
        for piece in filter(None, map(str.strip, quote.split("..."))):
            assert any(piece in literal for literal in known), f"no message has {piece!r} of {quote!r}"


def test_the_page_of_the_benchmark_and_the_table_of_recipes_are_complete() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs" / "site_pages.py"))["pages"]()["benchmark.md"]
    keys = [field.name for field in dataclasses.fields(Bench)]
    assert [name for name in (*ROWS, *STATES, *keys) if f"`{name}`" not in page] == []
    recipes = [path.stem for path in (REPOSITORY / "recipes").rglob("*.yaml")]
    tuning = (REPOSITORY / "docs" / "tuning.md").read_text()
    assert [name for name in recipes if f"`{name}`" not in tuning] == []
