"""The keys and rows of `ckpt-bench` as a page of the site, from its schema; docs/site_pages.py writes it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools

from ckpt_bench import schema
from ckpt_bench.measure.row_kinds import FAMILIES, ROWS, rows_of

from ckpt_component.config.keys import typed_value


def meanings() -> dict[str, str]:
    """Key -> the docstring below it."""
    (body,) = [
        node.body
        for node in ast.parse(inspect.getsource(schema)).body
        if isinstance(node, ast.ClassDef) and node.name == schema.Bench.__name__
    ]
    return {
        ast.unparse(item.target): " ".join(ast.literal_eval(after.value).split())
        for item, after in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr)
    }


def default_of(field: dataclasses.Field[object]) -> str:
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    return ", ".join(map(str, value)) if isinstance(value, list) else typed_value(value)


def page() -> str:
    """The whole page."""
    texts = meanings()
    states = ", ".join(f"`{name}` ({size:g} GB)" for name, size in schema.STATES.items())
    return "\n".join(
        [
            "# The benchmark\n\n`ckpt-bench KEY=VALUE ...`, as in any Hydra app. [Performance](performance.md) has the figures.\n",
            "| key | default | meaning |\n|---|---|---|",
            *(
                f"| `{key.name}` | `{default_of(key)}` | {texts[key.name]} |"
                for key in dataclasses.fields(schema.Bench)
            ),
            f"\n## States\n\n{states}.\n\n## Rows\n",
            "`_fast` rows use the fastest installed checksum, the others zlib's. Rows with * do not sync: the benchmark does, on the clock.\n",
            "| family | rows |\n|---|---|",
            *(
                f"| `{family}` | {', '.join(f'`{name}`' + '*' * (not ROWS[name].fsyncs) for name in rows_of(family))} |"
                for family in FAMILIES
            ),
            "",
        ]
    )
