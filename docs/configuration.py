"""Write docs/configuration.md from the schema: `python docs/configuration.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpt_component.config.keys import Key, keys
from ckpt_component.config.schema import GROUPS, PARTS

HEAD = """# Configuration

<!-- Written by docs/configuration.py from ckpt_component/config/schema.py. -->

`ckpt keys` prints these keys and their limits; `ckpt keys timeout` prints those that contain this word. [Hydra](hydra.md) shows how to set them.

| group | options |
|---|---|
| `checkpoint` | `sync`, `async_persistent`, `async_temporal`, `async_zero_overhead`, `off` |
"""

NOTES = """
All parts combine, except that `stager=none`, where the writer reads the live tensors, needs `caller=inline`, and
`recovery=host` and `peers`, where the writer process keeps the [snapshot](memory.md), need `caller=persistent`.

Sizes and times take units: `8MB` (10^6 bytes), `2GiB` (2^30), `90s`, `30m`, `2h`. `~` and `$VAR` in folders are expanded; for Hydra,
quote `~`: `'checkpoint.dir="~/ck"'`. A relative `dir` starts in the current folder; in a Hydra multirun,
in the job's output folder.
A key takes `null` if that is its default, or its meaning says so.
"""


def limits(key: Key) -> str:
    """The range of a number, short; a lower limit that one expects is left out."""
    if key.limits in ("", "a finite number above 0", "at least 0", "at least 1"):
        return ""
    for words, short in (("at least ", ">= "), ("from ", "")):
        if key.limits.startswith(words):
            return f" ({short}{key.limits.removeprefix(words)})"
    return f" ({key.limits})"


def row(key: Key, default: str) -> str:
    """The cells of a key: name, type, default, meaning."""
    text = key.text.replace("|", chr(92) + "|")
    choices = key.kind.removesuffix(" or null").split("|")
    kind = "choice" if len(choices) > 1 and all(f"`{choice}`" in text for choice in choices) else ", ".join(choices)
    return f"| `{key.name}` | {kind} | {default} | {text}{limits(key)} |"


def of_parts(kind: str) -> Iterator[str]:
    """A row for each key of `checkpoint/<kind>`, which several of its options may have."""
    alike: dict[str, list[Key]] = {}
    for key in keys():
        if key.option and key.name.startswith(f"{kind}."):
            alike.setdefault(key.name, []).append(key)
    for name, of_options in alike.items():
        assert len({(key.kind, key.limits, key.text) for key in of_options}) == 1, f"{name} differs by option"
        usual = of_options[0].default
        default = ", ".join(
            [f"`{usual}`", *(f"`{key.option}`: `{key.default}`" for key in of_options if key.default != usual)]
        )
        options = [key.option for key in of_options]
        having = "all" if options == [*PARTS[kind]] else ", ".join(f"`{option}`" for option in options)
        yield f"| {having} {row(of_options[0], default)}"


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    lines += [
        f"| `checkpoint/{group}` | {', '.join(f'`{name}`' for name in options)} |" for group, options in GROUPS.items()
    ]
    lines += [
        NOTES,
        "## Keys of `checkpoint`\n",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        *(row(key, f"`{key.default}`") for key in keys() if not key.option),
        "\n## Keys of the parts\n",
        "`checkpoint` has these keys if the option in the first column is chosen.\n",
        "| options | key | type | default | meaning |",
        "|---|---|---|---|---|",
        *(line for kind in PARTS for line in of_parts(kind)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
