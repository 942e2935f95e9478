"""`resolve_config` takes any form of config, and refuses what is wrong before anything is built."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from ckpt_component import CheckpointConfigError, build_manager, compose_checkpoint
from ckpt_component.config import resolve_config
from ckpt_component.config.schema import Checkpoint, Recovery
from ckpt_component.core.options import Durability, Naming, Overlap, RecoveryMode

PARTS: dict[str, Any] = {
    "stager": {"_target_": "ckpt_component.stagers.SharedMemoryStager"},
    "caller": {"_target_": "ckpt_component.callers.PersistentCaller"},
    "writer": {"_target_": "ckpt_component.writers.DcpWriter"},
}


def refused(config: Any, *overrides: str) -> str:
    with pytest.raises(CheckpointConfigError) as caught:
        resolve_config(config, overrides)
    return str(caught.value)


def test_a_preset_gets_types() -> None:
    config = resolve_config("async_persistent", ["checkpoint.naming=step", "checkpoint.save.every_seconds=60"])
    assert isinstance(config, Checkpoint)
    assert config.naming is Naming.step
    assert config.overlap is Overlap.wait
    assert config.durability is Durability.power_cut
    assert type(config.save.every_seconds) is float
    assert config.caller == {
        "_target_": "ckpt_component.callers.PersistentCaller",
        "nice": 10,
        "io_priority": "low",
        "page_cache": "auto",
    }
    assert type(config.caller) is dict


@pytest.mark.slow
def test_all_forms_of_a_config_give_the_same() -> None:
    composed = compose_checkpoint("async_persistent")
    expected = resolve_config("async_persistent")
    assert resolve_config(composed) == expected
    assert resolve_config(cast(dict[str, Any], OmegaConf.to_container(composed))) == expected
    assert resolve_config(PARTS) == expected
    assert resolve_config(expected) == expected


@pytest.mark.parametrize("make", [compose_checkpoint, lambda: {**PARTS, "save": {"every_steps": 5}}])
def test_overrides_go_on_top_of_a_config(make: Any) -> None:
    given = make()
    before = copy.deepcopy(given)
    config = resolve_config(
        given,
        ["checkpoint/stager=zero_overhead", "checkpoint.stager.arenas=4", "checkpoint.save.at_end=false"],
    )
    assert config.stager == {"_target_": "ckpt_component.stagers.ZeroOverheadStager", "arenas": 4}
    assert config.save.at_end is False
    assert config.save.every_steps == given["save"]["every_steps"]
    assert given == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: "async_persistent", compose_checkpoint, lambda: PARTS], ids=["name", "node", "dict"]
)
def test_a_group_of_keys_is_picked_and_its_keys_are_set(make: Any) -> None:
    config = resolve_config(
        make(), ["checkpoint/recovery=host", "checkpoint.recovery.every_steps=5", "checkpoint.recovery.lease=5m"]
    )
    assert config.recovery == Recovery(RecoveryMode.host, 5, 300.0)
    assert resolve_config(config, ["checkpoint/recovery=none"]).recovery == Recovery()
    assert resolve_config(make()).recovery == Recovery()


def test_a_dict_may_hold_enums_paths_and_interpolations() -> None:
    config = resolve_config({**PARTS, "overlap": Overlap.skip, "dir": Path("/data"), "naming": "step"})
    assert (config.overlap, config.dir, config.naming) == (Overlap.skip, "/data", Naming.step)
    app = OmegaConf.create(
        {"root": "/data", "checkpoint": {**PARTS, "dir": "${root}/a", "keep": {"last": "${..n}"}, "n": 1}}
    )
    del app.checkpoint["n"]
    app.checkpoint.keep.last = 2
    assert resolve_config(app.checkpoint).dir == "/data/a"


def test_without_saving_no_parts_are_needed() -> None:
    config = resolve_config({"enabled": False})
    assert not config.enabled and config.stager == {}


def test_a_users_part_is_passed_as_it_is() -> None:
    mine = {"_target_": "my_app.Stager", "layers": [1, 2], "deep": {"a": None}}
    assert resolve_config({**PARTS, "stager": mine}).stager == mine


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", "auto"), (0, 0), (200, 200), ("200", 200), ("must", "must")], ids=repr
)
def test_resume_is_a_word_or_a_step(value: Any, expected: Any) -> None:
    assert resolve_config({**PARTS, "resume": value}).resume == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        # missing
        ({"dir": "???"}, "checkpoint.dir is missing; give it a value: checkpoint.dir=..."),
        (
            {"stager": {"_target_": "my.Stager", "size": "???"}},
            "checkpoint.stager.size is missing; give it a value: checkpoint.stager.size=...",
        ),
        ({"stager": "???"}, "checkpoint.stager is missing; give it a value: checkpoint.stager=..."),
        # unknown
        ({"nmaing": "step"}, "There is no key checkpoint.nmaing. Did you mean checkpoint.naming?"),
        (
            {"save": {"every": 3}},
            "There is no key checkpoint.save.every. Did you mean checkpoint.save.every_steps?",
        ),
        (
            {"save": {"x": 3}},
            "There is no key checkpoint.save.x. The keys of checkpoint.save: every_steps, every_seconds, at_end, frozen.",
        ),
        ({"keep": 3}, "checkpoint.keep cannot itself be 3. Did you mean checkpoint.keep.last=3?"),
        (
            {"save": 3},
            "checkpoint.save cannot itself be 3. The keys of checkpoint.save: every_steps, every_seconds, at_end, frozen.",
        ),
        (
            {"writer": {**PARTS["writer"], "wrokers": 3}},
            "There is no key checkpoint.writer.wrokers. Did you mean checkpoint.writer.workers?",
        ),
        (
            {"recovery": {"evry_steps": 5}},
            "There is no key checkpoint.recovery.evry_steps. Did you mean checkpoint.recovery.every_steps?",
        ),
        (
            {"recovery": {"mode": "hots"}},
            "checkpoint.recovery.mode must be none, host or peers, got hots. Did you mean checkpoint.recovery.mode=host?",
        ),
        (
            {"recovery": "host"},
            "checkpoint.recovery='host' sets a string; to choose a component use a slash: checkpoint/recovery=host",
        ),
        ({"recovery": {"every_steps": 0}}, "checkpoint.recovery.every_steps must be at least 1, got 0."),
        ({"recovery": {"lease": 0}}, "checkpoint.recovery.lease must be a finite number above 0, got 0.0."),
        # parts
        (
            {"stager": "pinned"},
            "checkpoint.stager='pinned' sets a string; to choose a component use a slash: checkpoint/stager=pinned",
        ),
        (
            {"caller": None},
            "checkpoint.caller is None, not a part; to pick one use a slash: checkpoint/caller=persistent",
        ),
        (
            {"writer": {"workers": 3}},
            "checkpoint.writer has no _target_, the class to build; to choose a component use a slash: checkpoint/writer=dcp",
        ),
        # types
        (
            {"save": {"every_steps": "often"}},
            "checkpoint.save.every_steps: Value 'often' of type 'str' could not be converted to Integer.",
        ),
        (
            {"overlap": "thread"},
            "checkpoint.overlap must be wait, skip or error, got thread.",
        ),
        (
            {"writer": {**PARTS["writer"], "workers": "four"}},
            "checkpoint.writer.workers: Value 'four' of type 'str' could not be converted to Integer.",
        ),
        ({"dir": "${nowhere}"}, "checkpoint.dir: Interpolation key 'nowhere' not found."),
        # ranges
        ({"dir": ""}, "checkpoint.dir is empty; name a folder: checkpoint.dir=checkpoints"),
        (
            {"dir": "ftp://b/c"},
            "checkpoint.dir=ftp://b/c is no folder and no bucket; buckets begin with s3://, gs://, az://, memory:// and their name.",
        ),
        (
            {"resume": "nevr"},
            "checkpoint.resume must be auto, must, never, best, a step or a path, got nevr. Did you mean checkpoint.resume=never?",
        ),
        (
            {"resume": "latest"},
            "checkpoint.resume must be auto, must, never, best, a step or a path, got latest. Did you mean checkpoint.resume=auto?",
        ),
        ({"resume": -1}, "checkpoint.resume must be auto, must, never, best, a step or a path, got -1."),
        ({"save": {"every_steps": 0}}, "checkpoint.save.every_steps must be at least 1, got 0."),
        (
            {"save": {"every_seconds": 0}},
            "checkpoint.save.every_seconds must be a finite number above 0, got 0.0.",
        ),
        ({"keep": {"last": 0}}, "checkpoint.keep.last must be at least 1, got 0."),
        ({"keep": {"every_steps": -5}}, "checkpoint.keep.every_steps must be at least 1, got -5."),
        (
            {"timeouts": {"stage": float("inf")}},
            "checkpoint.timeouts.stage must be a finite number above 0, got inf.",
        ),
        (
            {"timeouts": {"close": float("nan")}},
            "checkpoint.timeouts.close must be a finite number above 0, got nan.",
        ),
        (
            {"on_error": "ignore"},
            "checkpoint.on_error must be raise, warn or retry, got ignore. Did you mean checkpoint.on_error=warn?",
        ),
        ({"retry": {"attempts": 1}}, "checkpoint.retry.attempts must be at least 2, got 1."),
        (
            {"retry": 3},
            "checkpoint.retry cannot itself be 3. The keys of checkpoint.retry: attempts, backoff_seconds, max_backoff_seconds.",
        ),
        ({"give_up_after": 0}, "checkpoint.give_up_after must be at least 1, got 0."),
        ({"max_stall_s": 0}, "checkpoint.max_stall_s must be a finite number above 0, got 0.0."),
        ({"min_free_bytes": -1}, "checkpoint.min_free_bytes must be at least 0, got -1."),
        # contradictions
        (
            {"timeouts": {"heartbeat": 300, "stall": 300}},
            "checkpoint.timeouts.heartbeat=300 must be less than checkpoint.timeouts.stall=300; else a dead rank "
            "would be taken for a hung one.",
        ),
        (
            {"timeouts": {"stall": 300, "write": 100}},
            "checkpoint.timeouts.stall=300 must be less than checkpoint.timeouts.write=100; else the write would time out "
            "before a hung rank is noticed.",
        ),
        (
            {"max_stall_s": 400, "timeouts": {"stage": 300}},
            "checkpoint.max_stall_s=400 has no effect beyond checkpoint.timeouts.stage=300, which ends the same waits; "
            "lower the first or raise the second.",
        ),
        (
            {"retry": {"backoff_seconds": 90, "max_backoff_seconds": 60}},
            "checkpoint.retry.backoff_seconds=90 is above checkpoint.retry.max_backoff_seconds=60; lower the first or "
            "raise the second.",
        ),
        ({"stager": {**PARTS["stager"], "arenas": 0}}, "checkpoint.stager.arenas must be from 1 to 16, got 0."),
        ({"caller": {**PARTS["caller"], "nice": 20}}, "checkpoint.caller.nice must be from 0 to 19, got 20."),
        (
            {"writer": {**PARTS["writer"], "block_bytes": 1}},
            "checkpoint.writer.block_bytes must be from 4096 to 1073741824, got 1.",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_in_words(changes: dict[str, Any], text: str) -> None:
    assert refused({**PARTS, **changes}) == text


def test_policies_are_typed_and_have_their_defaults() -> None:
    config = resolve_config("async_persistent")
    assert (config.on_error.value, config.give_up_after, config.max_stall_s, config.min_free_bytes) == (
        "raise",
        3,
        None,
        0,
    )
    overrides = ["checkpoint.on_error=retry", "checkpoint.retry.attempts=5", "checkpoint.give_up_after=null"]
    config = resolve_config(
        "async_persistent", [*overrides, "checkpoint.max_stall_s=2", "checkpoint.min_free_bytes=null"]
    )
    assert (config.on_error.value, config.retry.attempts, config.give_up_after) == ("retry", 5, None)
    assert (config.max_stall_s, config.min_free_bytes) == (2.0, None)


def test_a_missing_part_is_named_with_what_to_pick() -> None:
    assert refused({"stager": PARTS["stager"]}) == (
        "checkpoint.caller is missing. Start from a preset, checkpoint=async_persistent, or pick a "
        "part: checkpoint/caller=persistent"
    )


def test_unknown_keys_come_first_and_ranges_last() -> None:
    wrong = {**PARTS, "dir": "???", "nmaing": 1, "stager": "pinned", "keep": {"last": 0}}
    assert "nmaing" in refused(wrong) and "dri" in refused({"dri": "d"})
    del wrong["nmaing"]
    assert "dir is missing" in refused(wrong)
    assert "sets a string" in refused({**wrong, "dir": "d"})
    assert "at least 1" in refused({**wrong, "dir": "d", "stager": PARTS["stager"]})


def test_the_config_of_the_whole_app_is_recognized() -> None:
    assert refused(OmegaConf.create({"lr": 1, "checkpoint": PARTS})) == (
        "This config has the keys lr, checkpoint, so it is the config of the whole app; pass what is below `checkpoint`, such "
        "as build_manager(cfg.checkpoint)."
    )


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "checkpoint=sync",
            "checkpoint=sync picks a whole preset, but a config was already given; pass 'sync' as the config.",
        ),
        (
            "checkpoint/stagr=pinned",
            "There is no group checkpoint/stagr. Did you mean checkpoint/stager=pinned?",
        ),
        (
            "writer.workers=4",
            "There is no key writer.workers. Did you mean checkpoint.writer.workers=4?",
        ),
        (
            "checkpoint.writer.wrokers=4",
            "There is no key checkpoint.writer.wrokers. Did you mean checkpoint.writer.workers?",
        ),
        (
            "checkpoint.stager=pinned",
            "checkpoint.stager='pinned' sets a string; to choose a component use a slash: checkpoint/stager=pinned",
        ),
        (
            "~checkpoint.keep.last",
            "checkpoint.keep.last cannot be deleted. Set it to null instead, if it may be null: checkpoint.keep.last=null",
        ),
        (
            "checkpoint.writer.workers=1,2",
            "checkpoint.writer.workers=1,2 has several values. Quote them if they are one string; to sweep, run a Hydra app "
            "with -m.",
        ),
    ],
)
def test_overrides_on_a_config_are_checked(override: str, text: str) -> None:
    assert refused(compose_checkpoint(), override) == text


def test_an_unknown_part_on_a_config_lists_those_that_are() -> None:
    assert refused(PARTS, "checkpoint/stager=pined") == (
        "There is no checkpoint/stager=pined. Did you mean checkpoint/stager=pinned? checkpoint/stager can be: none, "
        "pinned, shared_memory, zero_overhead."
    )


@pytest.mark.parametrize("config", [3, None, ["checkpoint=sync"], OmegaConf.create([1])])
def test_what_is_no_config_is_refused(config: Any) -> None:
    assert "A checkpoint config is a preset's name, a DictConfig or a dict, not" in refused(config)


def test_a_word_in_place_of_a_list_is_refused_with_the_list(tmp_path: Path) -> None:
    text = "checkpoint.load.ignore is a list: checkpoint.load.ignore=[lm_head]."
    with pytest.raises(CheckpointConfigError, match=f"^{re.escape(text)}$"):
        build_manager("sync", ["checkpoint.load.ignore=lm_head"], dir=tmp_path)
