"""The example of docs/hydra.md for hydra-zen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckpt_component

pytest.importorskip("hydra_zen")

PAGE = Path(ckpt_component.__file__).resolve().parents[1] / "docs" / "hydra.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="needs the checkout, which has the page")
@pytest.mark.filterwarnings("ignore:.*_execution_whitelist_")  # of Hydra 1.4, for each target
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python notest: needs hydra-zen[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "runs" / name / "iter_0000001") for name in ("zen", "sync")
    ]


@pytest.mark.filterwarnings("ignore:.*_execution_whitelist_")
def test_builds_of_build_manager_takes_a_dataclass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from hydra_zen import builds, instantiate

    from ckpt_component import build_manager
    from ckpt_component.config import Checkpoint, DcpWriter, InlineCaller, LiveStager

    config = Checkpoint(stager=LiveStager(), caller=InlineCaller(), writer=DcpWriter())
    with instantiate(builds(build_manager, config=config, hydra_recursive=False), dir=str(tmp_path)) as manager:
        assert manager.path_of(1) == str(tmp_path / "iter_0000001")
    with pytest.raises(Exception, match="The checkpoint config is a CheckpointManager, which was built already"):
        instantiate(builds(build_manager, config=config), dir=str(tmp_path))
