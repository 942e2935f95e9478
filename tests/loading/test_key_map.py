"""Loads under other keys: `rename`, `prefix` and `ignore`; and all that does not fit in one error."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import ones, zeros

from ckpt_component import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointTypeError,
    MissingKeysError,
    SyncCheckpointer,
    UnexpectedKeysError,
    build_checkpointer,
    build_manager,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def ours() -> Iterator[SyncCheckpointer]:
    with build_checkpointer("sync", ["checkpoint.durability=process_crash"]) as checkpointer:
        assert isinstance(checkpointer, SyncCheckpointer)
        yield checkpointer


class Net(torch.nn.Module):
    """Blocks, an embedding that the output shares, and a head."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.LayerNorm(3) for _ in range(2)])
        self.embed = torch.nn.Embedding(5, 3)
        self.out = torch.nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.head = torch.nn.Linear(3, classes)


OTHER = {
    **{f"body.h.{number}.{name}": torch.full((3,), number + 1.0) for number in range(2) for name in ("weight", "bias")},
    "body.embed.weight": torch.full((5, 3), 7.0),
    "head.weight": ones(2, 3),
    "head.bias": ones(2),
}


@pytest.fixture(params=["safetensors", "torch_save", "stock dcp", "dcp"])
def other(request: pytest.FixtureRequest, tmp_path: Path, ours: SyncCheckpointer) -> Path:
    """A flat state dict of another program: with other names, and a head for other classes."""
    path = tmp_path / "other.safetensors"
    if request.param == "safetensors":
        save_file(OTHER, path)
    elif request.param == "torch_save":
        torch.save(OTHER, path := tmp_path / "other.pt")
    elif request.param == "stock dcp":
        dcp.save(OTHER, checkpoint_id=path)
    else:
        ours.save(OTHER, path)
    return path


def check(net: Net) -> None:
    for number, block in enumerate(net.blocks):
        assert isinstance(block, torch.nn.LayerNorm) and block.weight.eq(number + 1).all()
        assert block.bias.eq(number + 1).all()
    assert net.out.weight is net.embed.weight and net.embed.weight.eq(7).all()


def test_weights_of_another_program(other: Path, ours: SyncCheckpointer) -> None:
    net = Net()
    head = net.head.weight.detach().clone()
    rename = {"body.h": "blocks", "body": ""}
    ours.load(other, {"model": net}, strict=True, rename=rename, prefix="model", ignore=["head"])
    check(net)
    assert torch.equal(net.head.weight, head)
    net = Net()
    assert ours.load(other, net, strict=True, allow_unexpected=False, rename=rename, ignore=["head"]) is net
    check(net)
    state = Net().state_dict()
    ours.load(other, state, strict=True, rename=rename, ignore=["head.*"])
    assert state["blocks.1.bias"].eq(2).all() and not state["head.bias"].eq(1).any()


def test_a_full_state_keeps_what_the_checkpoint_lacks_if_told_so(other: Path, tmp_path: Path) -> None:
    def restore(*overrides: str, **options: Any) -> Net:
        net = Net(2)
        state: dict[str, Any] = {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.5), "epoch": 3}
        changes = [f"checkpoint.resume={other}", "checkpoint.save.at_end=false", *overrides]
        with build_manager("sync", changes, dir=tmp_path / "run") as manager:
            assert manager.restore(state, **options) == 0
        assert state["epoch"] == 3 and state["optimizer"].param_groups[0]["lr"] == 0.5
        assert net.head.weight.eq(1).all()
        return net

    names = {"body.h": "model.blocks", "body": "model", "head": "model.head"}
    check(restore(rename=names, ignore=["optimizer", "epoch"]))
    text = "{body.h: blocks, body: ''}"
    check(
        restore(
            f"checkpoint.load.rename={text}", "checkpoint.load.prefix=model", "checkpoint.load.ignore=[optimizer,epoch]"
        )
    )
    with pytest.raises(MissingKeysError, match="optimizer.param_groups.0.lr"):
        restore(rename=names, ignore=["epoch"])


def test_the_runs_own_newest_checkpoint_loads_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for start in (None, 1):
        state = {"a": ones(2)}
        with build_manager("sync", ["checkpoint.load.rename={old: new}"], dir=tmp_path) as manager:
            assert manager.restore(state, ignore=["nothing"] if start else ()) == start
            manager.save(1, state)
    assert (
        "ignore is for a checkpoint that checkpoint.resume names by step or path; this one loads as it is"
        in caplog.text
    )
    with (
        build_manager("sync", ["checkpoint.resume=1", "checkpoint.load.rename={old: new}"], dir=tmp_path) as manager,
        pytest.raises(CheckpointLoadError, match="rename has 'old', which fits no key"),
    ):
        manager.restore({"a": ones(2)})


CASES: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = [
    ({"a": {"b": 1}}, {"a": "x.y"}, {"x": {"y": {"b": 1}}}),
    ({"a": {"b": 1}, "c": 2}, {"a": ""}, {"b": 1, "c": 2}),
    ({"a": 1, "b": 2}, {"a": "b", "b": "a"}, {"b": 1, "a": 2}),
    ({"a": {"b": 1, "c": 2}}, {"a": "x", "a.b": "y"}, {"y": 1, "x": {"c": 2}}),
    ({"ab": 1, "a": 2}, {"a": "x"}, {"ab": 1, "x": 2}),
    ({"h": [{"w": 1}, {"w": 2}]}, {"h": "g"}, {"g": [{"w": 1}, {"w": 2}]}),
    ({"h": [{"w": 1}]}, {"h.0": "first"}, {"first": {"w": 1}}),
    ({"o": {"state": {0: 1}}}, {"o": "opt"}, {"opt": {"state": {0: 1}}}),
    ({"m": {"0.weight": 1, "0.bias": 2}}, {"m.0": "m.first"}, {"m": {"first.weight": 1, "first.bias": 2}}),
    ({"m": {"net.0.w": 1}}, {"m.net": "model"}, {"model": {"0.w": 1}}),
    ({"m.a.w": 1}, {"m.a": "n.b"}, {"n.b.w": 1}),
    ({"h.0.attn.w": 1, "h.1.mlp.w": 2}, {"h.*.attn": "b.*.at"}, {"b.0.at.w": 1, "h.1.mlp.w": 2}),
    ({"l.0.norm.gamma": 1, "gamma": 2}, {"*.gamma": "*.weight"}, {"l.0.norm.weight": 1, "gamma": 2}),
    ({"q.1.k.2": 1}, {"*.1.*.2": "*.*"}, {"q.k": 1}),
    ({"module.a": {"b": 1}}, {"module.": ""}, {"a": {"b": 1}}),
    ({"a": {}, "b": 1}, {"a": "c"}, {"c": {}, "b": 1}),
]


@pytest.mark.parametrize("saved, rename, loaded", CASES)
def test_names(saved: Any, rename: dict[str, str], loaded: Any, ours: SyncCheckpointer, tmp_path: Path) -> None:
    ours.save(saved, tmp_path / "one")
    assert ours.load(tmp_path / "one", rename=rename) == loaded
    assert ours.load(tmp_path / "one", rename=rename, prefix="p.q") == {"p": {"q": loaded}}
    torch.save(saved, tmp_path / "two.pt")
    assert ours.load(tmp_path / "two.pt", rename=rename) == loaded


def test_what_is_ignored_may_have_more_in_the_target(other: Path, ours: SyncCheckpointer) -> None:
    names = {"body.h": "blocks", "body": ""}
    target: dict[str, Any] = {"model": Net(), "step": 4, "more": {"a": ones(1)}}
    target["model"].head = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 4))
    ours.load(other, target, strict=True, rename=names, prefix="model", ignore=["head", "step", "*.a"])
    check(target["model"])
    for ignore, missing in ((["head.weight"], r"model\.head\.0\.weight"), (["head"], r"'more\.a', 'step'")):
        with pytest.raises(MissingKeysError, match=missing):
            ours.load(other, target, strict=True, rename=names, prefix="model", ignore=ignore)


def test_tied_tensors_stay_tied(ours: SyncCheckpointer, tmp_path: Path) -> None:
    shared = ones(3)
    ours.save({"a": shared, "b": {"c": shared}}, tmp_path / "one")
    loaded = ours.load(tmp_path / "one", rename={"b.c": "d"})
    assert loaded["a"] is loaded["d"]


def test_an_empty_dict_takes_what_is_renamed_to_it(ours: SyncCheckpointer, tmp_path: Path) -> None:
    save_file({"net.a.w": ones(1), "net.b": zeros(1)}, tmp_path / "x.safetensors")
    target: dict[str, Any] = {"model": {}}
    ours.load(tmp_path / "x.safetensors", target, strict=True, prefix="model", rename={"net": ""})
    assert [*target["model"]] == ["a.w", "b"]


def test_ema_weights_in_place_of_the_model(ours: SyncCheckpointer, tmp_path: Path) -> None:
    ours.save({"model": OrderedDict(w=zeros(1)), "ema": {"w": ones(1)}}, tmp_path / "one")
    target = {"model": {"w": zeros(1)}}
    with pytest.raises(CheckpointLoadError, match=r"'model\.w' and 'ema\.w' of .* would both become 'model\.w'\. "):
        ours.load(tmp_path / "one", target, rename={"ema": "model"})
    ours.load(tmp_path / "one", target, rename={"ema": "model"}, ignore=["model"])
    assert target["model"]["w"] == 1
    target["model"]["other"] = zeros(1)
    with pytest.raises(MissingKeysError, match=r"model\.other"):
        ours.load(tmp_path / "one", target, strict=True, rename={"ema": "model"}, ignore=["model"])


WRONG: list[tuple[dict[str, Any], type[CheckpointError], str]] = [
    (
        {"rename": {"bodi.h": "x"}},
        CheckpointLoadError,
        r"rename has 'bodi\.h', which fits no key of .*\. Did you mean 'body\.h'\?",
    ),
    (
        {"rename": {"zzz": "x", "qq": "y"}},
        CheckpointLoadError,
        r"has '\w+', '\w+', which fit no key of .*\. Its keys are ",
    ),
    (
        {"ignore": ["heads"]},
        CheckpointLoadError,
        r"ignore has 'heads', which fits no key of .*\. Did you mean 'head'\?",
    ),
    ({"rename": {"head.bias": ""}}, CheckpointLoadError, r"nothing of the key 'head\.bias' .* ignore=\['head\.bias'\]"),
    ({"rename": {"*.bias": "x"}}, CheckpointLoadError, r"has 1 and 0 times '\*'"),
    ({"rename": ["a"]}, CheckpointTypeError, "must be a dict of names"),
    ({"rename": {"a": 3}}, CheckpointTypeError, "must be a dict of names"),
    ({"prefix": 3}, CheckpointTypeError, "must be a name, such as prefix='model'"),
    ({"ignore": "head"}, CheckpointTypeError, r"must be a list of names, such as ignore=\['head'\]"),
]


@pytest.mark.parametrize("options, kind, text", WRONG)
def test_a_wrong_name_says_what_to_type(
    options: dict[str, Any], kind: type[CheckpointError], text: str, ours: SyncCheckpointer, tmp_path: Path
) -> None:
    save_file(OTHER, tmp_path / "x.safetensors")
    for target in (None, {"head": {"weight": zeros(2, 3), "bias": zeros(2)}}):
        with pytest.raises(kind, match=text) as caught:
            ours.load(tmp_path / "x.safetensors", target, **options)
        assert str(caught.value).count(". ") <= 1
        assert target is None or not target["head"]["bias"].any()


def test_everything_that_does_not_fit_is_in_one_error(ours: SyncCheckpointer, tmp_path: Path) -> None:
    many = {f"s{number:04}": zeros(2) for number in range(3000)}
    saved = {
        "shape": ones(2),
        "dtype": ones(2),
        "form": [1, 2],
        "extra": 1,
        "fits": ones(1),
        "object": {"a": 1, "t": (1,)},
    }
    ours.save({**saved, **many}, tmp_path / "one")
    target: dict[str, Any] = {
        "shape": zeros(3),
        "dtype": zeros(2, dtype=torch.float64),
        "form": {"a": 1, "b": zeros(1)},
        "missing": 3,
        "gone": zeros(1),
        "fits": zeros(1),
        "object": {"a": zeros(1), "t": [1]},
    }
    with pytest.raises(MissingKeysError) as caught:
        ours.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
    text = str(caught.value)
    for part in (
        "'form' is of type dict in the target and of type list in the checkpoint",
        "'shape' has shape (3,) in the target and (2,) in the checkpoint",
        "'dtype' is torch.float64 in the target and torch.float32 in the checkpoint",
        "'object.a' is a tensor in the target and a Python object in the checkpoint",
        "'object.t' is of type list in the target and of type tuple in the checkpoint",
        "it is missing keys: ['gone', 'missing']",
        "it has keys that the target does not have: extra, s0000",
        "s0018 and 2981 more",
        "pass allow_dtype_cast=True to convert it",
        "strict=False leaves these values as they are",
        "pass allow_unexpected=True to leave them",
    ):
        assert part in text, (part, text)
    assert "form.b" not in text and text.count("s0") == 19
    assert caught.value.keys == ["gone", "missing"]
    assert not target["fits"].any() and target["object"]["t"] == [1]
    del target["missing"], target["gone"]
    with pytest.raises(UnexpectedKeysError, match=r"one does not fit the target: 'shape' has") as unexpected:
        ours.load(tmp_path / "one", target, strict=True, allow_unexpected=False)
    assert len(unexpected.value.keys) == 3001
    with pytest.raises(CheckpointLoadError, match=r"s0019' has shape .* and 2980 more\.") as wrong:
        ours.load(tmp_path / "one", {key: zeros(3) for key in many})
    assert len(str(wrong.value)) < 2000 + len(str(tmp_path))


def test_missing_keys_under_other_names_are_suggested(
    ours: SyncCheckpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net(2)
    for saved, target, option, advice in (
        (net.state_dict(), {"model": net}, "prefix='model'", "Did you mean prefix='model'?"),
        (
            {"net": net.state_dict()},
            net,
            "rename={'net': ''}",
            "In the checkpoint these keys are below 'net': load them into {'net': ...}, or pass rename={'net': ''}.",
        ),
        (
            {key.replace("blocks", "body.h"): value for key, value in net.state_dict().items()},
            net,
            "rename={'body.h': 'blocks'}",
            "The checkpoint has 'blocks' as 'body.h': use that name, or pass rename={'body.h': 'blocks'}.",
        ),
    ):
        torch.save(saved, tmp_path / "x.pt")
        with pytest.raises(MissingKeysError) as caught:
            ours.load(tmp_path / "x.pt", target, strict=True)
        assert str(caught.value).endswith(advice), caught.value
        caplog.clear()
        ours.load(tmp_path / "x.pt", target)
        assert advice in caplog.text
        ours.load(tmp_path / "x.pt", target, strict=True, **eval(f"dict({option})"))
    with pytest.raises(MissingKeysError) as caught:
        ours.load(tmp_path / "x.pt", {"nothing": zeros(1)}, strict=True)
    assert "Did you mean" not in str(caught.value) and "The checkpoint has" not in str(caught.value)


def test_a_module_that_does_not_take_its_state_is_an_error(ours: SyncCheckpointer, tmp_path: Path) -> None:
    class Picky(torch.nn.Linear):
        def load_state_dict(self, *_: Any, **__: Any) -> Any:
            raise ValueError("not today")

    torch.save(torch.nn.Linear(1, 1).state_dict(), tmp_path / "x.pt")
    with pytest.raises(CheckpointLoadError, match=r"The target \(Picky\) did not take its state .*: not today"):
        ours.load(tmp_path / "x.pt", Picky(1, 1))
