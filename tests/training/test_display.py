from __future__ import annotations

import builtins
import io
import logging
import sys
from typing import Any

import pytest

from ckpt_component.apps.training.display import Bar, Lines, open_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), open_display(0, 100) as display:
        assert isinstance(display, Lines)
        display.advance()
        display.show(20, 2.5, 3e-3, 0.7)
    assert caplog.messages[0].startswith("step  20/100  loss 2.5000  lr 3.00e-03  grad norm 0.70  ")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_display(20, 40) as display:
        assert isinstance(display, Bar)
        display.advance()
        display.show(21, 2.5, 3e-3, 0.7)
    shown = terminal.getvalue()
    assert "training" in shown and "21/40" in shown and "loss 2.5000" in shown


def test_plain_lines_without_tqdm_and_a_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really_import = builtins.__import__

    def without_tqdm(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return really_import(name, *args, **kwargs)

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    with caplog.at_level(logging.INFO), open_display(0, 10) as display:
        assert isinstance(display, Lines)
    assert "tqdm is not installed" in caplog.text
