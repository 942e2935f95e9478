"""The picture and the page, where matplotlib is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ckpt_bench.row_page import rows_shown
from ckpt_bench.runs import Case
from ckpt_bench.verdicts import Verdict

pytest.importorskip("matplotlib", reason="needs the extra 'plot'")


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    run = {"stall": 0.1, "durable": 1.0, "lost": -0.1, "load_warm": 0.2, "memory": 10, "state_bytes": 10, "torn": 0}
    case = Case("tiny", "disk", {"limits": [{"memcpy": 0.1}], "sync": [run, run], "torch_save": [{"error": "<b>"}]})
    verdicts = [Verdict("it is fast", 2.0, True, "a over b")]
    paths = rows_shown([case, Case("large", "disk", {})], verdicts).write_page({"cores": 2}, tmp_path)
    assert [path.name for path in paths] == ["figures.png", "figures.html"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    page = paths[1].read_text()
    assert "data:image/png;base64," in page and not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "it is fast" in page and "&lt;b&gt;" in page and "<b>" not in page


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    shown = rows_shown([Case("tiny", "disk", {"sync": [{"error": "it broke"}]})], [])
    assert shown.write_page({}, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
