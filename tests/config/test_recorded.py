"""The composed config as checkpoints store it: what is in it, what is resolved, and what is never written."""

from __future__ import annotations

import json
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
import omegaconf
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from kept_configs import compose_once
from omegaconf import DictConfig, OmegaConf

from ckpt_component import build_manager, stored_config
from ckpt_component.config import config_dir
from ckpt_component.config.secrets import HIDDEN
from ckpt_component.factory.launch import recorded_config

PASSWORD = "hunter2-from-the-environment"
#: OmegaConf 2.4 has another name for it, and warns of the one of 2.3.
_register: Any = getattr(OmegaConf, "register_new_resolver" if omegaconf.__version__ < "2.4" else "register_resolver")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_WORD", PASSWORD)


def app(**keys: Any) -> DictConfig:
    """The config of an app with a checkpoint config in it."""
    return OmegaConf.create({"checkpoint": {**compose_once("sync")}, **keys})


def recorded(**keys: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return recorded_config(app(**keys).checkpoint, [])


# --- which config ---------------------------------------------------------------------------------------------------


def test_of_a_node_the_whole_app_is_stored_with_the_overrides_of_the_manager(tmp_path: Path) -> None:
    cfg = app(lr=0.5, twice="${lr}", extra={"place": "${twice}/x"})
    with build_manager(cfg.checkpoint, ["checkpoint.keep.last=7", "checkpoint/stager=none"], dir=tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(2)})
    stored = stored_config(tmp_path / "iter_0000001")
    assert (stored.config["twice"], stored.config["extra"]) == ("${lr}", {"place": "${twice}/x"})
    assert (stored.resolved["twice"], stored.resolved["extra"]) == (0.5, {"place": "0.5/x"})
    for tree in (stored.config, stored.resolved):
        assert tree["checkpoint"]["keep"]["last"] == 7
        assert tree["checkpoint"]["stager"]["_target_"] == "ckpt_component.stagers.LiveStager"
    assert cfg.checkpoint.keep.last == 3  # the user's own config is as it was


def test_of_a_node_that_is_not_at_the_top_it_stays_where_it_is() -> None:
    cfg = OmegaConf.create({"train": {"ckpt": {**compose_once("sync")}, "lr": 1}})
    config, _ = recorded_config(cfg.train.ckpt, ["checkpoint.keep.last=7"])
    assert config.keys() == {"train"} and config["train"]["lr"] == 1 and config["train"]["ckpt"]["keep"]["last"] == 7


@pytest.mark.parametrize("form", ["name", "dict", "composed"])
def test_in_a_plain_loop_it_is_the_checkpoint_config(form: str) -> None:
    forms: dict[str, Any] = {
        "name": "sync",
        "dict": OmegaConf.to_container(compose_once("sync")),
        "composed": compose_once("sync"),
    }
    for tree in recorded_config(forms[form], ["checkpoint.keep.last=7"]):
        assert tree.keys() == {"checkpoint"} and tree["checkpoint"]["keep"]["last"] == 7


@pytest.mark.parametrize("form", ["node", "name"])
def test_in_a_hydra_job_it_is_that_of_the_job(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with initialize_config_dir(str(config_dir()), **_version()):
        cfg = compose(overrides=["+checkpoint=sync", "+lr=0.5", "+job='${hydra:job.name}'"], return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(cfg)
    config, resolved = recorded_config(cfg.checkpoint if form == "node" else "sync", ["checkpoint.keep.last=7"])
    assert config.keys() == resolved.keys() == {"checkpoint", "lr", "job"}  # and not what is Hydra's own
    assert resolved["checkpoint"]["keep"]["last"] == 7
    assert (config["job"], resolved["job"]) == ("${hydra:job.name}", HydraConfig.get().job.name)


def _version() -> dict[str, str]:
    return {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}


# --- secrets --------------------------------------------------------------------------------------------------------


def test_what_the_environment_says_is_never_written(tmp_path: Path) -> None:
    keys = {
        "data": "${oc.env:CKPT_TEST_WORD}",
        "login": {"user": "me", "word": "${oc.env:CKPT_TEST_WORD}"},
        "url": "postgres://me:${login.word}@host",
        "again": "<${url}>",
        "copy": "${login}",
        "list": ["${data}"],
        "size": "${oc.decode:${oc.env:CKPT_TEST_WORD}}",
        "module": "oc",
        "named": "${${module}.env:CKPT_TEST_WORD}",
    }
    with build_manager(app(**keys).checkpoint, dir=tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(2)})
    for path in (tmp_path / "iter_0000001").iterdir():
        assert PASSWORD.encode() not in path.read_bytes()
    stored = stored_config(tmp_path / "iter_0000001")
    assert {key: stored.config[key] for key in keys} == keys
    word = "${oc.env:CKPT_TEST_WORD}"
    assert {key: stored.resolved[key] for key in keys} == {
        "data": word,
        "login": {"user": "me", "word": word},
        "url": f"postgres://me:{word}@host",
        "again": f"<postgres://me:{word}@host>",
        "copy": {"user": "me", "word": word},
        "list": [word],
        "size": "${oc.decode:${oc.env:CKPT_TEST_WORD}}",
        "module": "oc",
        "named": "${${module}.env:CKPT_TEST_WORD}",
    }


def test_instantiate_passes_values_and_what_is_stored_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hydra 1.4 warns of what the caller has not allowed.
    allowed: Any = getattr(hydra.utils, "execution_whitelist", nullcontext)
    folder = f"{tmp_path}/${{oc.env:CKPT_TEST_WORD}}"
    with initialize_config_dir(str(config_dir()), **_version()):
        cfg = compose(
            overrides=["+checkpoint=sync", "+lr=7", f"checkpoint.dir='{folder}'", "checkpoint.keep.last='${lr}'"],
            return_hydra_config=True,
        )
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(cfg)
    with allowed("ckpt_component.*"), hydra.utils.instantiate(cfg.checkpoint, rewind=True) as manager:
        manager.save(1, {"weight": torch.ones(2)})
        path = Path(manager.path_of(1))
    stored = stored_config(path)
    assert stored.config["checkpoint"]["dir"] == stored.resolved["checkpoint"]["dir"] == folder
    assert (stored.config["checkpoint"]["keep"]["last"], stored.resolved["checkpoint"]["keep"]["last"]) == ("${lr}", 7)
    assert stored.config["checkpoint"]["rewind"] is True and stored.config["lr"] == 7
    assert PASSWORD not in (path / "run.json").read_text()


def test_the_value_of_a_variable_that_looks_like_a_credential_is_hidden_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("CKPT_TEST_API_KEY", "1f2e3d4c5b"),
        ("CKPT_TEST_TOKEN", "short"),
        ("CKPT_TEST_TOKEN_FILE", "/dev/null"),
    ):
        monkeypatch.setenv(name, value)
    for config in recorded(header="Bearer 1f2e3d4c5b!", other="short", place="/dev/null"):
        assert [config[key] for key in ("header", "other", "place")] == [f"Bearer {HIDDEN}!", "short", "/dev/null"]


@pytest.mark.parametrize(
    "key",
    [
        *("password", "PASSWORD", "db_password", "dbPassword", "passwd", "passphrase", "secret", "client_secret"),
        *("token", "hf_token", "authToken", "api_key", "apikey", "WANDB_API_KEY", "aws_access_key_id", "accessKeyId"),
        *("aws_secret_access_key", "private_key", "kms-key-id", "credentials", "authorization", "auth"),
        *("passwords", "clientsecret", "ClientSecrets", "dbpassword", "authtoken", "accesskeys", "privatekey"),
        *(
            "pass",
            "db_pass",
            "PGPASS",
            "creds",
            "cred",
            "private_keys",
            "pat",
            "github_pat",
            "sas",
            "cookie",
            "cookies",
        ),
    ],
)
def test_literal_secrets_are_hidden_wherever_they_would_appear(key: str) -> None:
    below = {key: "abc", "other": "x"}
    for config in recorded(
        section=below, inside={key: {"deep": ["abc"]}}, text=f"<${{section.{key}}}>", copy="${section}"
    ):
        assert config["section"] == {key: HIDDEN, "other": "x"} and config["inside"] == {key: {"deep": [HIDDEN]}}
        assert "abc" not in str(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tokenizer", "bpe"), ("max_tokens", 512), ("token_dim", 8), ("token", 3), ("eos_token", "</s>")),
        *(("pad_token", "<pad>"), ("primary_key", "id"), ("keys", "a"), ("password", None), ("use_auth", True)),
        *(("secret", ""), ("author", "me"), ("path", "a:b@c"), ("url", "http://user@host:80/x@y")),
        *(("pattern", "*.bin"), ("patience", 3), ("passes", 2), ("num_pass", 2), ("forward_pass", "fused")),
        *(("bypass", "no"), ("compass", "n"), ("sasrec", "x"), ("cookiecutter", "x"), ("credit", "x"), ("monkey", "x")),
        *(("sort_key", "step"), ("keys", ["a"]), ("secretary", "x"), ("detokenizer", "x"), ("key", "x")),
        *(("query", "https://host/x?page=2&sort=key"), ("text", "the bearer of rings"), ("rate", "what?token=1")),
    ],
)
def test_what_is_no_secret_is_stored(key: str, value: Any) -> None:
    for config in recorded(section={key: value}):
        assert config["section"] == {key: value}


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("postgres://me:pw@host:5432/db", f"postgres://me:{HIDDEN}@host:5432/db"),
        ("https://host/x?page=2&token=abc#top", f"https://host/x?page=2&token={HIDDEN}#top"),
        ("https://host/x?api_key=a1&X-Amz-Signature=b2", f"https://host/x?api_key={HIDDEN}&X-Amz-Signature={HIDDEN}"),
        ("https://host/c?sv=2024&sig=a%2Fb", f"https://host/c?sv=2024&sig={HIDDEN}"),
        ("Authorization: Bearer eyJhbGci.eyJz.a1_-", f"Authorization: Bearer {HIDDEN}"),
        (["bearer 0123456789abcdef"], [f"bearer {HIDDEN}"]),
    ],
)
def test_secrets_are_hidden_by_the_form_of_a_text(value: Any, stored: Any) -> None:
    for config in recorded(value=value):
        assert config["value"] == stored


def test_a_key_below_what_makes_it_a_secret_is_hidden() -> None:
    for config in recorded(private={"key": "abc", "keys": ["abc"], "key_size": 2048}, table={"key": "id"}):
        assert config["private"] == {"key": HIDDEN, "keys": [HIDDEN], "key_size": 2048}
        assert config["table"] == {"key": "id"}


def test_resolvers_that_read_secrets_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def twice(text: str) -> str:
        asked.append(text)
        return text * 2

    for name in ("vault", "aws_secret", "environment", "twice"):
        _register(name, twice, replace=True)
    try:
        _, resolved = recorded(
            a="${vault:a}", b="${aws_secret:b}", c="${environment:c}", d="${twice:d}", e="${twice:api_key}"
        )
    finally:
        for name in ("vault", "aws_secret", "environment", "twice"):
            OmegaConf.clear_resolver(name)
    assert asked == ["d"] and resolved["d"] == "dd"
    assert [resolved[key] for key in "abce"] == [
        "${vault:a}",
        "${aws_secret:b}",
        "${environment:c}",
        "${twice:api_key}",
    ]


# --- what cannot be resolved ----------------------------------------------------------------------------------------


def test_what_cannot_be_resolved_stays_as_it_is_written_and_the_rest_is_resolved() -> None:
    _register("broken", lambda: 1 / 0, replace=True)
    keys: dict[str, Any] = {
        "nowhere": "${not.there}",
        "broken": "${broken:}",
        "unknown": "${no_such_resolver:1}",
        "missing": "???",
        "one": "${other}",
        "other": "${one}",
        "cycle": {"inner": "${cycle}"},
    }
    try:
        _, resolved = recorded(**keys, n=2, good=["${n}"])
    finally:
        OmegaConf.clear_resolver("broken")
    assert {key: resolved[key] for key in keys} == keys and resolved["good"] == [2]


def test_a_config_that_cannot_be_stored_is_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_component.factory.launch.unresolved", lambda *_: 1 / 0)
        with build_manager("sync", dir=tmp_path) as manager:
            manager.save(1, {"weight": torch.ones(2)})
    stored = stored_config(tmp_path / "iter_0000001")
    assert (stored.config, stored.resolved) == ({}, {}) and stored.versions["torch"] == str(torch.__version__)
    assert "the config could not be stored in the checkpoints: division by zero" in caplog.text


def test_values_that_json_does_not_have_are_text(tmp_path: Path) -> None:
    keys: dict[Any, object] = {
        "inf": float("inf"),
        "nan": float("nan"),
        "folder": Path("/data"),
        "raw": b"\xff",
        "lone": "\ud800",
        3: "three",
    }
    with build_manager(OmegaConf.create({**app(), **keys}).checkpoint, dir=tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(2)})
    text = (tmp_path / "iter_0000001" / "run.json").read_text("utf-8")
    stored = json.loads(text, parse_constant=pytest.fail)["config"]
    assert [stored[key] for key in ("inf", "nan", "folder", "3")] == ["inf", "nan", "/data", "three"]


def test_a_job_in_another_folder_names_the_commit_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    start, commit = tmp_path / "start", "a" * 40
    (start / ".git").mkdir(parents=True)
    (start / ".git" / "HEAD").write_text(commit)
    monkeypatch.chdir(tmp_path)
    settings = OmegaConf.create({"hydra": {"mode": None, "runtime": {"cwd": str(start), "output_dir": "???"}}})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", settings)
    with build_manager("sync", dir=tmp_path / "run") as manager:
        manager.save(1, {"weight": torch.ones(2)})
    assert stored_config(tmp_path / "run" / "iter_0000001").commit == commit
    assert os.getcwd() == str(tmp_path)
