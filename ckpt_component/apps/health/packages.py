"""Checks of what is installed: versions, optional packages, and the Hydra plugin. Imports none of it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .finding import FAILS, NOTE, OK, Finding

_NAME = "ckpt_component"
#: A requirement without its marker: `hydra-core<1.5,>=1.3.2`.
_REQUIREMENT = re.compile(r"([\w.-]+)\s*\(?([^;)]*)\)?\s*(?:;(.*))?")


def check_packages() -> Iterator[Finding]:
    """Check the versions of what is needed, and list what is optional."""
    try:
        requirements = metadata.requires(_NAME) or []
    except metadata.PackageNotFoundError:
        text = "ckpt_component is on the path and not installed, so Hydra apps do not find its configs"
        yield Finding("installation", NOTE, text, "pip install -e . in its folder")
        return
    optional: dict[str, str | None] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            continue
        name, limits, marker = match[1], match[2].strip(), match[3] or ""
        version = _version(name)
        if "extra ==" in marker:
            if not re.search(r"extra == ['\"]test['\"]", marker):
                optional[name] = version
            continue
        if version is None:
            yield Finding(name, FAILS, "not installed", f"pip install '{name}{limits}'")
        elif not _fits(version, limits):
            yield Finding(name, FAILS, f"{version}, and {limits} is needed", f"pip install '{name}{limits}'")
        else:
            yield Finding(name, OK, version)
    yield _plugin()
    installed = [f"{name} {version}" for name, version in sorted(optional.items()) if version]
    missing = [name for name, version in sorted(optional.items()) if not version]
    yield Finding("optional packages", OK, ", ".join(installed) or "none")
    if missing:
        yield Finding("not installed", OK, ", ".join(missing))


def _plugin() -> Finding:
    ours = Path(__file__).resolve().parents[2] / "_hydra_searchpath.py"
    spec = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(
        "hydra_plugins.ckpt_component_searchpath"
    )
    if spec is None or spec.origin is None:
        text = "not found: Hydra apps do not have the group checkpoint"
        return Finding("Hydra plugin", NOTE, text, "install the package again: pip install -e .")
    if Path(spec.origin).read_bytes() != ours.read_bytes():
        text = f"{spec.origin} is of another version"
        return Finding("Hydra plugin", NOTE, text, "install the package again: pip install -e .")
    return Finding("Hydra plugin", OK, "every Hydra app has checkpoint=... and +recipe=...")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(version: str, limits: str) -> bool:
    """Whether a version is within limits like `>=1.3.2,<1.5`; other operators are not checked."""
    for limit in filter(None, limits.split(",")):
        match = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", limit)
        if match and (_numbers(version) >= _numbers(match[2])) != (match[1] == ">="):
            return False
    return True


def _numbers(version: str) -> list[int]:
    match = re.match(r"[\d.]*", version)
    return [int(number) for number in (match[0] if match else "").split(".") if number]
