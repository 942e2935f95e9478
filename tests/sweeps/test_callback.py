"""The report at a sweep's end: in an app of our own in any case, in another by the callback itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ckpt_component.sweeps.callback import SweepReport, reported
from ckpt_component.sweeps.result import write_result


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    (tmp_path / "0").mkdir()
    write_result(str(tmp_path / "0"), "completed", overrides=[], choices={}, figures={"stall_s": 0.5})
    return tmp_path


def config(folder: Path) -> object:
    return OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})


def test_another_app_gets_the_report_from_the_callback(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = SweepReport()
    callback.on_multirun_start(config(sweep))  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    callback.on_multirun_end(config(sweep))  # type: ignore[arg-type]
    assert "500 ms" in capsys.readouterr().out


@pytest.mark.parametrize("ended", [False, True])
def test_our_apps_report_once_whether_or_not_hydra_tells_the_end(
    sweep: Path, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    callback = SweepReport()
    with pytest.raises(SystemExit), reported():
        callback.on_multirun_start(config(sweep))  # type: ignore[arg-type]
        if ended:
            callback.on_multirun_end(config(sweep))  # type: ignore[arg-type]
        assert capsys.readouterr().out == ""
        raise SystemExit(1)
    assert capsys.readouterr().out.count("500 ms") == 1


def test_no_report_without_a_sweep_and_none_but_rank_0s(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with reported():
        pass
    monkeypatch.setenv("RANK", "1")
    with reported():
        SweepReport().on_multirun_start(config(sweep))  # type: ignore[arg-type]
    SweepReport().on_multirun_end(config(sweep))  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_a_sweep_without_a_job_says_so_and_lets_the_first_error_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="the first"), reported():
        SweepReport().on_multirun_start(config(tmp_path))  # type: ignore[arg-type]
        raise ValueError("the first")
    assert "no report: " in capsys.readouterr().err
