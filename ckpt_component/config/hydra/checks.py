"""Checks of a composed config, each with its error text. Most work on plain dicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf

from ...core.commit.manifest import checkpoint_around
from ...core.commit.names import NAMINGS
from ...core.storage.bucket_store import SCHEMES
from ...core.storage.locate import below, file_storage, is_url, same_folder
from ..schema import PARTS, Checkpoint, Publish, Upload, part_schema
from .explain import USUAL, not_itself, picked_with_a_dot, unknown_key_of
from .hydra_errors import HydraConfigError, built_text
from .read import missing_text

#: Hydra's own keys, which a part may have. Values reach the constructor as plain data in any case.
HYDRA_KEYS = ("_target_", "_convert_", "_recursive_")


def refuse_whole_app(tree: Mapping[str, Any]) -> None:
    """Refuse the whole config of an app, passed instead of its `checkpoint`."""
    if "checkpoint" in tree and "stager" not in tree:
        raise HydraConfigError(
            f"This config has the keys {', '.join(map(str, tree))}, so it is the config of the whole app; pass "
            "what is below `checkpoint`, such as build_manager(cfg.checkpoint)."
        )


def refuse_built(config: Any) -> None:
    """Refuse a manager or parts that `instantiate` has built already, and whatever else is not a config."""
    if hasattr(config, "maybe_save"):
        raise HydraConfigError(
            f"The checkpoint config is a {type(config).__name__}, which was built already: use it as it is. If "
            "instantiate built it inside another object, put _recursive_: false beside the _target_ of that."
        )
    if not isinstance(config, Mapping) and not (is_dataclass(config) and not isinstance(config, type)):
        raise HydraConfigError(
            f"A checkpoint config is a preset's name, a DictConfig or a dict, not {type(config).__name__}."
        )
    for kind in PARTS:
        cls = _class_of(config, kind)
        if isinstance(cls, type) and cls.__module__ != "builtins" and not hasattr(cls, "_target_"):
            raise HydraConfigError(built_text(f"checkpoint.{kind}", cls))


def refuse_missing(tree: Mapping[str, Any]) -> None:
    """Refuse a mandatory key that is absent or `???`. With `enabled: false` no parts are needed."""
    for kind in PARTS:
        if kind not in tree and tree.get("enabled", True) is not False:
            raise HydraConfigError(
                f"checkpoint.{kind} is missing. Start from a preset, checkpoint=async_persistent, or pick a part: "
                f"checkpoint/{kind}={USUAL[kind]}"
            )
    for key, value in _leaves(tree, "checkpoint"):
        if value == "???":
            raise HydraConfigError(missing_text(key))


def refuse_unknown_keys(tree: Mapping[str, Any], schema: type = Checkpoint, name: str = "checkpoint") -> None:
    """Refuse a key that the schema does not have, and a value where keys belong."""
    hints = get_type_hints(schema)
    for key, value in tree.items():
        inner = hints.get(key)
        if inner is None and key not in HYDRA_KEYS:
            raise HydraConfigError(unknown_key_of(name, str(key), [item.name for item in fields(schema)]))
        if is_dataclass(inner):
            if not isinstance(value, Mapping):
                raise HydraConfigError(not_itself(f"{name}.{key}", value, [item.name for item in fields(inner)]))
            refuse_unknown_keys(value, cast(type, inner), f"{name}.{key}")


def refuse_text_parts(tree: Any) -> None:
    """Refuse a part that was set with a dot, which makes it a string, or to another value that is not a part."""
    for kind in PARTS:
        part = tree.get(kind, {})
        pick = f"checkpoint/{kind}={USUAL[kind]}"
        if isinstance(part, str) and part != "???":
            raise HydraConfigError(picked_with_a_dot(kind, part))
        if not isinstance(part, (Mapping, str)):
            raise HydraConfigError(f"checkpoint.{kind} is {part!r}, not a part; to pick one use a slash: {pick}")
        if part and "_target_" not in part:
            raise HydraConfigError(
                f"checkpoint.{kind} has no _target_, the class to build; to choose a component use a slash: {pick}"
            )


def refuse_unknown_part_keys(kind: str, part: Mapping[str, Any]) -> None:
    """Refuse a key that one of our own parts does not have. `part_class` checks the keys of a user's class."""
    schema = part_schema(kind, str(part.get("_target_")))
    if schema is not None:
        refuse_unknown_keys(part, schema, f"checkpoint.{kind}")


def refuse_bad_dir(value: str, key: str = "checkpoint.dir", such: str = "checkpoints") -> None:
    """Refuse an empty folder, and a URL that is not of a bucket."""
    if not value:
        raise HydraConfigError(f"{key} is empty; name a folder: {key}={such}")
    scheme, single, rest = value.partition(":/")
    if single and scheme in SCHEMES and not rest.startswith("/"):
        raise HydraConfigError(f"{key}={value} has one slash; for a bucket type {scheme}://{rest}")
    scheme, url, rest = value.partition("://")
    if url and (scheme not in SCHEMES or not rest.strip("/")):
        raise HydraConfigError(
            f"{key}={value} is no folder and no bucket; buckets begin with "
            f"{', '.join(f'{each}://' for each in SCHEMES)} and their name."
        )


def refuse_bad_options(value: Any) -> None:
    """Refuse anything but a dict of plain values. Does not show them: they may be secrets."""
    plain = isinstance(value, Mapping) and all(isinstance(each, (str, int, float)) for each in value.values())
    if value is not None and not plain:
        raise HydraConfigError(
            "checkpoint.storage.options is not a dict of plain values; set one by one, such as "
            "+checkpoint.storage.options.endpoint=https://storage.example"
        )


def refuse_bad_tiers(config: Checkpoint) -> None:
    """Refuse a local folder that is a URL or the permanent folder, and uploads without one."""
    local = config.local.dir
    if local is None:
        usual = vars(Upload())
        changed = [name for name, value in vars(config.upload).items() if value != usual[name]]
        if changed:
            raise HydraConfigError(
                f"checkpoint.upload.{changed[0]} has no effect without a local folder to upload from; name a fast one "
                "that all ranks see: checkpoint.local.dir=/scratch/checkpoints"
            )
        return
    if not local or "://" in local:
        raise HydraConfigError(f"checkpoint.local.dir={local} is not a local folder; a URL goes to checkpoint.dir.")
    if same_folder(local, config.dir):
        both = f"both {local}" if local == config.dir else f"one folder, {local} and {config.dir}"
        raise HydraConfigError(
            f"checkpoint.local.dir and checkpoint.dir are {both}; name a fast local folder and a permanent one."
        )
    advice = "name a folder of its own: checkpoint.local.dir=/scratch/checkpoints"
    refuse_inside_checkpoint("checkpoint.local.dir", local, {"dir": config.dir}, config, advice)


def refuse_bad_publish(config: Checkpoint) -> None:
    """Refuse versions where checkpoints are, a mirror that is not on a local disk, and keys that have no effect."""
    publish, usual = config.publish, vars(Publish())
    if publish.to is None:
        changed = [name for name, value in vars(publish).items() if value != usual[name]]
        if changed:
            raise HydraConfigError(
                f"checkpoint.publish.{changed[0]} has no effect without a place for the versions; name a folder or a "
                "bucket: checkpoint.publish.to=/shared/weights"
            )
        return
    refuse_bad_dir(publish.to, "checkpoint.publish.to", "weights")
    refuse_among_checkpoints(config, publish.to, publish.mirror, roots_of(config))
    mirror = publish.mirror
    if mirror is None and config.local.dir is None and is_url(config.dir):
        raise HydraConfigError(
            "checkpoint.publish.to needs a copy of the newest weights on a local disk, and checkpoint.dir="
            f"{config.dir} is a bucket; name a folder for it: checkpoint.publish.mirror=/scratch/mirror"
        )
    if mirror is not None and (not mirror or is_url(mirror)):
        raise HydraConfigError(
            f"checkpoint.publish.mirror={mirror} is not a folder on a local disk, where the copy of the newest weights "
            "is; name one: checkpoint.publish.mirror=/scratch/mirror"
        )


def roots_of(config: Checkpoint) -> dict[str, str]:
    """The folders of the checkpoints by key, or their URLs."""
    return {key: root for key, root in (("dir", config.dir), ("local.dir", config.local.dir)) if root is not None}


def refuse_among_checkpoints(config: Checkpoint, to: str, mirror: str | None, roots: Mapping[str, str]) -> None:
    """Refuse versions, and a mirror, where checkpoints are, however the folders are spelled.

    Args:
        config: the config
        to: where the versions go
        mirror: the mirror; None: beside the checkpoints
        roots: the folders of the checkpoints, by key
    """
    advice = "name a folder of its own, which receivers see: checkpoint.publish.to=/shared/weights"
    for key, root in roots.items():
        if same_folder(to, root):
            raise HydraConfigError(
                f"checkpoint.publish.to={to} is the same folder as checkpoint.{key}={root}; {advice}"
            )
    refuse_inside_checkpoint("checkpoint.publish.to", to, roots, config, advice)
    if mirror is None or is_url(mirror) or not mirror:
        return
    advice = "give the mirror one of its own."
    if any(same_folder(mirror, other) for other in (to, *roots.values())):
        raise HydraConfigError(
            f"checkpoint.publish.mirror={mirror} is also the folder of the versions or of the checkpoints; {advice}"
        )
    refuse_inside_checkpoint("checkpoint.publish.mirror", mirror, roots, config, advice)


def refuse_inside_checkpoint(name: str, place: str, roots: Mapping[str, str], config: Checkpoint, advice: str) -> None:
    """Refuse a folder that is a checkpoint, is in one, or has the name of one, however it is spelled.

    Args:
        name: the key that names it
        place: the folder, or its URL
        roots: the folders of the checkpoints, by key
        config: the config
        advice: what to type instead
    """
    names = NAMINGS[config.naming.value]
    for key, root in roots.items():
        if names.step((below(place, root) or "").partition("/")[0]) is not None:
            raise HydraConfigError(f"{name}={place} is in a checkpoint of checkpoint.{key}={root}; {advice}")
    checkpoint = None if is_url(place) else checkpoint_around(file_storage(), place)
    if checkpoint is not None:
        raise HydraConfigError(f"{name}={place} is in the checkpoint {checkpoint}; {advice}")


def refuse_bad_rename(value: Any, key: str = "checkpoint.load.rename") -> None:
    """Refuse anything but a dict of names."""
    names = [*value, *value.values()] if isinstance(value, Mapping) else [value]
    if value is not None and not (isinstance(value, Mapping) and all(isinstance(name, str) for name in names)):
        raise HydraConfigError(
            f"{key}={value!r:.200} is not a dict of names; give old and new ones: '{key}={{encoder:body}}'"
        )


def refuse_bad_peers(value: Any) -> None:
    """Refuse anything but a dict of hosts, of which none is its own peer."""
    key = "checkpoint.recovery.peers"
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in [*value, *value.values()]):
        raise HydraConfigError(
            f"{key}={value!r:.200} is not a dict of hosts; give each the one that has its copies: "
            f"'{key}={{node1:node4}}'"
        )
    for host, peer in value.items():
        if host == peer:
            raise HydraConfigError(f"{key} has {host} keep its own copies; give it another host, or leave it out.")


def refuse_contradictions(config: Checkpoint) -> None:
    """Refuse two values that contradict each other."""
    times = config.timeouts
    for shorter, longer, why in (
        ("heartbeat", "write", "a dead rank would be noticed only after the write has timed out"),
        ("heartbeat", "stall", "a dead rank would be taken for a hung one"),
        ("stall", "write", "the write would time out before a hung rank is noticed"),
    ):
        # Values that are null follow the others.
        short, long = getattr(times, shorter), getattr(times, longer)
        if short is not None and long is not None and short >= long:
            raise HydraConfigError(
                f"checkpoint.timeouts.{shorter}={short:g} must be less than checkpoint.timeouts.{longer}={long:g}; "
                f"else {why}."
            )
    if config.max_stall_s is not None and times.stage is not None and config.max_stall_s > times.stage:
        raise HydraConfigError(
            f"checkpoint.max_stall_s={config.max_stall_s:g} has no effect beyond checkpoint.timeouts.stage="
            f"{times.stage:g}, which ends the same waits; lower the first or raise the second."
        )
    retry = config.retry
    if retry.max_backoff_seconds is not None and retry.backoff_seconds > retry.max_backoff_seconds:
        raise HydraConfigError(
            f"checkpoint.retry.backoff_seconds={retry.backoff_seconds:g} is above "
            f"checkpoint.retry.max_backoff_seconds={retry.max_backoff_seconds:g}; lower the first or raise the second."
        )


def _class_of(config: Any, key: str) -> Any:
    """The class of a value; of a node, that of its schema."""
    if isinstance(config, DictConfig):
        node = config._get_node(key, validate_access=False)
        return None if node is None else OmegaConf.get_type(node)
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return OmegaConf.get_type(value) if OmegaConf.is_config(value) else type(value)


def _leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{name}.{key}")]
    return [(name, tree)]
