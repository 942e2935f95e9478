"""Write docs/configuration.md from the schema: `python docs/configuration.py`."""

from __future__ import annotations

from pathlib import Path

from ckpt_component.config.keys import keys
from ckpt_component.config.schema import PARTS

HEAD = """# Configuration

<!-- Written by docs/configuration.py from ckpt_component/config/schema.py. -->

`ckpt keys` prints these keys, and `ckpt keys PATTERN` those with a word in them, such as `ckpt keys timeout`.

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
Installing the package adds these groups, and nothing else, to every Hydra app of the environment; `--info searchpath` shows it.
Suggestions for mistyped keys are in our commands, and in an app [that asks for them](hydra.md#mistyped-overrides).
"""


def rows(option: str, prefix: str) -> list[str]:
    """A table row for each key of `checkpoint` (`option` is empty), or of an option of a part."""
    return [
        f"{f'| `{option}` ' if option else ''}| `{key.name}` | {key.kind.replace('|', ', ')} | `{key.default}` | "
        f"{key.text.replace('|', chr(92) + '|')}{f' ({key.limits})' if key.limits else ''} |"
        for key in keys()
        if key.option == option and key.name.startswith(prefix)
    ]


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    lines += [
        f"| `checkpoint/{kind}` | {', '.join(f'`{name}`' for name in options)} |" for kind, options in PARTS.items()
    ]
    lines += [
        NOTES,
        "## Keys of `checkpoint`\n",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        *rows("", ""),
    ]
    for kind, options in PARTS.items():
        lines += [
            f"\n## Keys of `checkpoint/{kind}`\n",
            "| option | key | type | default | meaning |",
            "|---|---|---|---|---|",
        ]
        for name in options:
            lines += rows(name, f"{kind}.") or [f"| `{name}` | - | - | - | no keys |"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
