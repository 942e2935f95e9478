"""`ckpt completion` as a shell uses it; shtab is in the extra `cli`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_component.cli.app import COMMANDS, main


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as left:
        main(["completion", shell])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    return out


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ckpt.bash").write_text(script(capsys, "bash"))
    asking = """
source ckpt.bash
COMP_WORDS=(ckpt pre) COMP_CWORD=1; _shtab_ckpt; echo "${COMPREPLY[@]}"
COMPREPLY=(); COMP_WORDS=(ckpt plan --sto) COMP_CWORD=2; _shtab_ckpt; echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(["bash", "-c", asking], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split() == ["presets", "--storage-gbps"], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_all_commands(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    text = script(capsys, shell)
    assert [command for command in COMMANDS if command not in text] == []


def test_without_shtab_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as left:
        main(["completion", "bash"])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == ""
    assert err == "error: Completion needs shtab: pip install shtab.\n"
