"""Write docs/configuration.md from the schema: `python docs/configuration.py`."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ckpt_component.config import schema
from ckpt_component.config.schema import PARTS, Checkpoint

HEAD = """# Configuration

<!-- Written by docs/configuration.py from ckpt_component/config/schema.py. -->

A slash picks a part, a dot sets a value:

```bash slow
ckpt-train model=gpt_nano train.steps=10 checkpoint=async_persistent checkpoint/stager=pinned checkpoint.writer.workers=4
```

| group | options |
|---|---|
| `checkpoint` | `sync`, `async_persistent`, `async_temporal`, `async_zero_overhead`, `off` |
"""

NOTES = """
All combinations of parts work but one: `stager=none` lets the writer read the live tensors, so it needs `caller=inline`.

Sizes and times take units: `8MB` (10^6 bytes), `2GiB` (2^30), `90s`, `30m`, `2h`. `~` and `$VAR` in folders are expanded; quote `~`
for Hydra: `'checkpoint.dir="~/ck"'`. A relative `dir` starts in the current folder, in a Hydra multirun in the job's output folder.

In Python: `build_manager("async_persistent", overrides=["checkpoint.keep.last=2"])`. In a Hydra app: `build_manager(cfg.checkpoint)`
or `instantiate(cfg.checkpoint)`, see [Hydra](hydra.md).
Installing the package adds these groups, and suggestions for mistyped keys below `checkpoint`, to every Hydra app of the environment;
`--info searchpath` shows it. `with ckpt_component.config.override_hints(): main()` explains all of an app's keys.
"""


def docs_of(cls: type) -> dict[str, str]:
    """The text below each field of a dataclass, those of its bases included."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
        for item, after in itertools.pairwise(body):
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[ast.unparse(item.target)] = str(after.value.value)
    return texts


def text_of(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float):
        return f"`{value:g}`"
    return "`null`" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def rows_of(cls: type, prefix: str) -> list[str]:
    """A table row for each key, nested dataclasses included."""
    texts, rows = docs_of(cls), []
    for field in fields(cls):
        if field.name in ("_target_", "_recursive_", "stager", "caller", "writer"):
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if is_dataclass(default):
            rows += rows_of(type(default), f"{prefix}{field.name}.")
            continue
        limits = field.metadata.get("range")
        text = texts[field.name].replace("|", "\\|") + (f" ({limits})" if limits else "")
        rows.append(f"| `{prefix}{field.name}` | {text_of(default)} | {text} |")
    return rows


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    lines += [
        f"| `checkpoint/{kind}` | {', '.join(f'`{name}`' for name in options)} |" for kind, options in PARTS.items()
    ]
    lines += [
        NOTES,
        "## Keys of `checkpoint`\n",
        "| key | default | meaning |",
        "|---|---|---|",
        *rows_of(Checkpoint, ""),
    ]
    for kind, options in PARTS.items():
        lines += [f"\n## Keys of `checkpoint/{kind}`\n", "| option | key | default | meaning |", "|---|---|---|---|"]
        for name, cls in options.items():
            rows = rows_of(cls, f"{kind}.") or ["| - | - | no keys |"]
            lines += [f"| `{name}` {row}" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert schema.__file__ is not None
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
