"""`Launch`: what a run knows of the script that builds it."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .._version import __version__
from ..config.hydra.compose import plain_dict
from ..config.hydra.hydra_job import MultirunJob, chosen_preset, job_config, job_overrides, launch_folder, multirun_job
from ..config.hydra.resolve import unresolved
from ..config.secrets import HIDDEN, environment_secrets, is_private, shown
from ..core.commit.run_record import StoredConfig, running_script
from ..core.outside import OUTSIDE

logger = logging.getLogger(__name__)

#: A SHA-1 or SHA-256 in hexadecimal.
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
#: Larger than any of the files but `packed-refs`, which has a line for each of perhaps many branches.
_MAX_CHARACTERS = 64 << 20


def commit_of(folder: str, seconds: float = 2.0) -> str | None:
    """The commit that is checked out in a folder or one above it; None if there is none.

    Args:
        folder: where to begin
        seconds: how long to wait for storage that does not answer; one log line then, or if a file cannot be read
    """
    commits: list[str | None] = []

    def read() -> None:
        try:
            commits.append(_commit(Path(folder)))
        except (OSError, ValueError) as error:
            commits.append(None)
            logger.info("the git commit of %s could not be read: %s", folder, error)

    OUTSIDE.start("ckpt-git", read).join(seconds)
    if not commits:
        logger.info("the git commit of %s could not be read within %g s", folder, seconds)
        return None
    return commits[0]


def _commit(folder: Path) -> str | None:
    git = next((path / ".git" for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    if git is None:
        return None
    if git.is_file():  # of a worktree or a submodule: it names the folder
        git = git.parent / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD")
    if not head.startswith("ref:"):
        return _checked(head)
    name = head.removeprefix("ref:").strip()
    link = git / "commondir"
    shared = git / _text(link) if link.is_file() else git
    for place in (git, shared):
        if (place / name).is_file():
            return _checked(_text(place / name))
    packed = shared / "packed-refs"
    for line in _text(packed).splitlines() if packed.is_file() else ():
        commit, _, branch = line.partition(" ")
        if branch == name:
            return _checked(commit)
    return None  # no commit yet


def _checked(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


def _text(path: Path) -> str:
    with path.open(encoding="utf-8") as stream:
        return stream.read(_MAX_CHARACTERS).strip()


#: Stands for the text of an interpolation while others are resolved; characters of private use.
_MARK = re.compile("\ue000(\\d+)\ue001")


def recorded_config(config: Any, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a manager and of the app around it, unresolved, and resolved where that may and can be.

    Args:
        config: what the manager was built from: a node of an app's config, its own config, or a dict
        overrides: applied to it

    Returns:
        Two nested dicts. In a Hydra job they hold the config of the whole job; else that of which `config` is a part,
        or `config` itself below the key `checkpoint`.
    """
    try:
        tree = _whole(config, unresolved(config, overrides))
        written, resolved = _changed(tree, shown), _resolved(tree)
        secrets = environment_secrets()
        if secrets is None:
            return written, resolved

        def scrub(_: str, value: Any) -> Any:
            return secrets.sub(HIDDEN, value) if isinstance(value, str) else value

        return _changed(written, scrub), _changed(resolved, scrub)
    except Exception as error:  # whatever a user's resolvers raise: a record is not a reason to stop a run
        logger.warning("the config could not be stored in the checkpoints: %s", error)
        return {}, {}


def _whole(config: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Put the checkpoint config into the app's config that it is a part of."""
    if isinstance(config, DictConfig) and config._get_parent() is not None:
        root, key = plain_dict(config._get_root(), resolve=False), config._get_full_key(None)
        if isinstance(root, dict) and root.keys() - {"checkpoint", "hydra"}:
            app = OmegaConf.create(_without_hydra(root), flags={"allow_objects": True})
            OmegaConf.update(app, key, tree, merge=False, force_add=True)
            return plain_dict(app, resolve=False)
    job = _without_hydra(job_config() or {})
    written = job.get("checkpoint")
    if isinstance(written, dict):
        # `instantiate` passes values, so take the interpolations from the job's config.
        node = OmegaConf.create(job, flags={"allow_objects": True}).checkpoint
        tree = _as_written(tree, written, _values(node, written))
    return {**job, "checkpoint": tree}


def _without_hydra(app: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in app.items() if key != "hydra"}


def _as_written(tree: Any, written: Any, values: Any) -> Any:
    """A config in the form of another one, `written`, wherever it has the `values` of that one."""
    if isinstance(tree, dict) and isinstance(written, dict) and isinstance(values, dict):
        return {key: _as_written(item, written.get(key, item), values.get(key)) for key, item in tree.items()}
    return written if values == tree else tree


def _resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace interpolations by their values, without secrets; what cannot be resolved stays as it is written.

    What is private does so too, also as a part of values that refer to it: a mark takes its place until then.
    """
    texts: list[str] = []

    def guard(key: str, value: Any) -> Any:
        public = shown(key, value)
        if public is value and isinstance(value, str) and "${" in value and is_private(key, value):
            texts.append(value)
            return f"\ue000{len(texts) - 1}\ue001"
        return public

    def restore(_: str, value: Any) -> Any:
        return _MARK.sub(lambda mark: texts[int(mark[1])], value) if isinstance(value, str) else value

    guarded = _changed(tree, guard)
    if "${" not in str(guarded):
        return dict(_changed(guarded, restore))
    values = _values(OmegaConf.create(guarded, flags={"allow_objects": True}), guarded)
    # A resolver may have made keys that were not there before.
    return dict(_changed(_changed(values, restore), shown))


def _changed(tree: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """Change all values of nested dicts and lists; `change` is called with the dotted key and the value."""
    if isinstance(tree, dict):
        return {name: _changed(item, change, f"{key}.{name}") for name, item in tree.items()}
    if isinstance(tree, list):
        return [_changed(item, change, key) for item in tree]
    return change(key, tree)


def _values(node: Any, written: Any) -> Any:
    """A node as plain values; `written` is its form with interpolations, which stays where one cannot be resolved."""
    if isinstance(node, DictConfig):
        return {key: _value(node, key, _at(written, key)) for key in node}
    if isinstance(node, ListConfig):
        return [_value(node, number, _at(written, number)) for number in range(len(node))]
    return node


def _value(node: DictConfig | ListConfig, key: Any, written: Any) -> Any:
    try:
        return _values(node[key], written)
    except (OmegaConfBaseException, RecursionError):
        return written


def _at(written: Any, key: Any) -> Any:
    """The written form below a node; that of the node itself if it is an interpolation of a whole dict or list."""
    return written[key] if isinstance(written, (dict, list)) else written


@dataclass(frozen=True)
class Launch:
    """The script around a run; without arguments, none.

    Attributes:
        preset: name of the preset that was chosen; None: unknown
        job: of a Hydra multirun
        record: returns the content of the run's record, which every checkpoint has; called on the leading rank
    """

    preset: str | None = None
    job: MultirunJob | None = None
    record: Callable[[], bytes] = StoredConfig().encode

    @classmethod
    def of_process(cls, preset: str | None, config: Any, overrides: Sequence[str]) -> Launch:
        """That of the script of this process.

        Args:
            preset: that was named; None: the one that its Hydra app has composed
            config: what it builds the run from
            overrides: applied to it
        """
        return cls(preset or chosen_preset(), multirun_job(), partial(_run_record, config, overrides))


def versions() -> dict[str, str]:
    """The versions of what runs here."""
    return {"ckpt_component": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _run_record(config: Any, overrides: Sequence[str]) -> bytes:
    written, resolved = recorded_config(config, overrides)
    commit = commit_of(launch_folder())
    return StoredConfig(written, resolved, versions(), commit, running_script(), job_overrides()).encode()
