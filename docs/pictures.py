"""The pictures of README.md, drawn from docs/pictures.json: `python docs/pictures.py` writes docs/pictures/*.svg.

The numbers are measured: `python docs/pictures.py measure BENCH` takes the bars from the `figures.csv` in the folder of
a run of `ckpt-bench` of this commit, and the two saves from runs that it makes itself.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent
NUMBERS = FOLDER / "pictures.json"
#: Rows of the benchmark and what they are called here.
ROWS = {
    "async_persistent": "async_persistent",
    "async_zero_overhead": "async_zero_overhead",
    "torch_checkpointing": "torch_checkpointing",
    "torch_save": "torch.save",
    "dcp_save_t1": "dcp.save",
}
_BENCHMARK = "GPT with Adam, 1.49 GB, 2 cores, a virtual disk"
#: One stylesheet for light and dark pages.
_STYLE = """
text { font: 13px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328 }
.small { font-size: 11.5px; fill: #59636e } .bold { font-weight: 600 }
.wait { fill: #d1603d } .copy { fill: #d9a441 } .write { fill: #4f86b8 } .train { fill: #8fb996 }
.line { stroke: #59636e; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .line { stroke: #9198a1 }
  .train { fill: #5f8f68 } .write { fill: #5b97d0 }
}
"""
_WIDTH, _LEFT, _RIGHT = 760, 170, 150


def picture(height: int, title: str, parts: Sequence[str]) -> str:
    """An SVG image; its title is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.5):.1f}" height="{height}" rx="2" class="{style}"/>'


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:.0f} ms"


def legend(y: float, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = float(_LEFT)
    for style, words in entries:
        yield bar(x, y - 10, 12, 12, style)
        yield text(x + 17, y, words, "small")
        x += 32 + 6.3 * len(words)


def heading(title: str, measured: str) -> list[str]:
    return [text(8, 20, title, "bold"), text(_WIDTH - 8, 20, measured, "small", "end")]


def benchmark(numbers: Mapping[str, Any], measured: str) -> str:
    """Bars: how long a save keeps training waiting, and until it is durable."""
    rows = {title: numbers[name] for name, title in ROWS.items()}
    scale = (_WIDTH - _LEFT - _RIGHT) / max(row["durable"] for row in rows.values())
    parts = heading(_BENCHMARK, measured)
    parts += legend(42, [("wait", "training waits"), ("write", "in the background, until durable")])
    y = 58
    for name, row in rows.items():
        parts += [text(_LEFT - 10, y + 15, name, anchor="end")]
        parts += [
            bar(_LEFT, y, row["durable"] * scale, 20, "write"),
            bar(_LEFT, y, row["stall"] * scale, 20, "wait"),
        ]
        words = f"{seconds(row['stall'])} of {seconds(row['durable'])}"
        parts += [text(_LEFT + row["durable"] * scale + 8, y + 15, words, "small")]
        y += 30
    return picture(y + 4, f"{_BENCHMARK}: seconds that training waits, and until durable", parts)


def saves(numbers: Mapping[str, Any], measured: str) -> str:
    """Two saves in time: what training, the copy and the writer process do."""
    lanes = numbers["lanes"]
    end = max(span[1] for lane in lanes for span in lane["spans"])
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    parts = heading(numbers["title"], measured)
    entries = [("train", "training steps"), ("wait", "training waits"), ("copy", "copy"), ("write", "write and sync")]
    parts += legend(42, entries)
    y = 58
    for lane in lanes:
        parts.append(text(_LEFT - 10, y + 13, lane["name"], "bold" if lane["first"] else "small", "end"))
        for begin, stop, style in lane["spans"]:
            parts.append(bar(_LEFT + begin * scale, y, (stop - begin) * scale, 17, style))
        if lane.get("committed"):
            x = _LEFT + lane["committed"] * scale
            parts += [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + 20}" class="line"/>']
            parts += [text(x + 5, y + 13, f"committed after {seconds(lane['committed'])}", "small")]
        y += 38 if lane["last"] else 21
    return picture(y, numbers["title"], parts)


def measured_figures(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """What the `figures.csv` of a run of `ckpt-bench` says by state and row: medians in seconds."""
    medians: dict[str, dict[str, dict[str, float]]] = {}
    with open(folder / "figures.csv", newline="") as file:
        for line in csv.DictReader(file):
            if line["median"]:
                row = medians.setdefault(line["state"], {}).setdefault(line["row"], {})
                row[line["figure"]] = round(float(line["median"]), 5)
    kept = ("stall", "staged", "durable", "lost", "load_warm", "load_cold")
    for rows in medians.values():
        limits = rows.pop("limits")
        for name, row in rows.items():
            rows[name] = {figure: row[figure] for figure in kept if figure in row}
        writes = [value for figure, value in limits.items() if figure.startswith(("write_", "direct_"))]
        rows["limits"] = {
            "stall": limits["memcpy"],
            "durable": min(writes),
            "load_warm": limits["read_crc32_warm"],
            "load_cold": limits["read_crc32_cold"],
        }
    return medians


def measured_lanes(megabytes: int = 400) -> list[dict[str, Any]]:
    """One save of each of two presets beside training steps, the second one of its run."""
    import time

    import torch

    from ckpt_component import build_manager

    lanes: list[dict[str, Any]] = []
    for preset in ("async_persistent", "async_zero_overhead"):
        model = torch.nn.ParameterList(torch.ones(1_000_000) for _ in range(megabytes // 4))
        other = torch.randn(700, 700)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        steps: list[tuple[float, float]] = []
        with tempfile.TemporaryDirectory(dir=".") as folder, build_manager(preset, dir=folder) as manager:
            manager.guard(optimizer)
            for step in range(1, 400):
                began = time.time()
                for _ in range(6):
                    other @ other
                optimizer.step()
                steps.append((began, time.time()))
                if step in (10, 60):
                    manager.save(step, {"model": model})
                    called = time.time()
                if step >= 60 and manager.reports and manager.reports[-1].step == 60 and time.time() > called + 0.1:
                    break
            manager.wait()
            report = next(each for each in manager.reports if each.step == 60)
        start = report.time
        train = [(a - start, b - start, "train") for a, b in steps if b > start and a < start + report.committed_s]
        train = [(max(a, report.stall_s), b, style) for a, b, style in train if b > report.stall_s]
        spans = {name: (a, b) for name, (a, b) in report.spans.items()}
        lanes += [
            {"name": preset, "first": True, "last": False, "spans": [(0.0, report.stall_s, "wait"), *train]},
            {"name": "copy", "first": False, "last": False, "spans": [(*spans["stage"], "copy")]},
            {
                "name": "writer process",
                "first": False,
                "last": True,
                "spans": [(*spans["write"], "write")],
                "committed": report.committed_s,
            },
        ]
    return lanes


def measure(folder: Path) -> None:
    """Write docs/pictures.json."""
    lanes = measured_lanes()
    rounded = [{**lane, "spans": [(round(a, 4), round(b, 4), s) for a, b, s in lane["spans"]]} for lane in lanes]
    median = statistics.median(b - a for lane in lanes for a, b, style in lane["spans"] if style == "train")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=FOLDER
    )
    numbers = {
        "measured": f"{date.today():%-d %B %Y}, commit {commit.stdout.strip()}",
        "figures": measured_figures(folder),
        "saves": {
            "title": f"A save of 400 MB beside steps of {median * 1000:.0f} ms, two presets",
            "lanes": rounded,
        },
    }
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")


def pictures() -> dict[Path, str]:
    """The pictures as they are to be, by path."""
    numbers = json.loads(NUMBERS.read_text())
    return {
        FOLDER / "pictures" / "benchmark.svg": benchmark(numbers["figures"]["large"], numbers["measured"]),
        FOLDER / "pictures" / "saves.svg": saves(numbers["saves"], numbers["measured"]),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(Path(sys.argv[2]))
    for path, content in pictures().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
