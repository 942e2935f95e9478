"""After a restore, the next three steps are those of the uninterrupted run, bit for bit, or the restore was refused.

Random modules, optimizers, groups, orders, dtypes and frozen parameters; modules and optimizers under other names, state
that goes from one optimizer to another, and checkpoints with or without what names the parameters. No third outcome.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from ckpt_component import CheckpointError, build_checkpointer

NAMES = ("a", "b", "c", "d", "e")
STEPS_BEFORE, STEPS_AFTER = 2, 3


class Float32State(torch.optim.Optimizer):
    """Momentum and master weights in float32, as optimizers of bfloat16 models keep them."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["master"] = parameter.detach().float().clone()
                state["momentum"].lerp_(parameter.grad.float(), 0.1)
                parameter.copy_(state["master"].sub_(state["momentum"], alpha=group["lr"]))


class NestedState(torch.optim.Optimizer):
    """Dicts of dicts, in float32 whatever the parameter has, and a number that is no tensor."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter, dtype=torch.float32)
                    state.update(steps=0, moments={"first": {"average": zeros.clone()}, "second": zeros.clone()})
                state["steps"] += 1
                average, second = state["moments"]["first"]["average"], state["moments"]["second"]
                average.lerp_(parameter.grad.float(), 0.3)
                second.addcmul_(average, average, value=0.7 / state["steps"])
                parameter.sub_(average / (second.sqrt() + 1), alpha=group["lr"])


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, foreach=True, amsgrad=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "float32 state": Float32State,
    "nested state": NestedState,
}

#: What of the model is in the state that is saved, and whether the optimizer was given names: what names the parameters.
HAS_NAMES = ("module", "module", "state dict", "names alone", "nothing")


#: How often something is, of the kinds that are seldom drawn.
MORE = st.sampled_from([2, 1, 0])


@dataclass(frozen=True)
class Plan:
    """How a script builds its model and optimizers: the order of layers and groups, and what is frozen.

    Attributes:
        declared: the layers, in order
        groups: the members of each group, by optimizer; an optimizer may have none
        frozen: the layers that are not trained
        named: whether the optimizers are given the names of their parameters
        called: what each layer is called
        keys: under which keys the optimizers are in the state
    """

    declared: Sequence[str]
    groups: Sequence[Sequence[Sequence[str]]]
    frozen: frozenset[str]
    named: bool
    called: Mapping[str, str]
    keys: Sequence[str]


@st.composite
def plans(draw: st.DrawFn, names: Sequence[str], before: Plan | None = None) -> Plan:
    """A plan; after another one, of the same groups or of others."""
    if before is None or draw(st.booleans()):
        order = draw(st.permutations(names))
        cuts = sorted({draw(st.integers(1, len(names) - 1)) for _ in range(draw(MORE))} if len(names) > 1 else [])
        bounds = [0, *cuts, len(names)]
        groups = [order[low:high] for low, high in itertools.pairwise(bounds)]
    else:
        partition = [group for optimizer in before.groups for group in optimizer]
        groups = [[*draw(st.permutations(group))] for group in draw(st.permutations(partition))]
    of_first = max(len(groups) - draw(MORE), 1)
    frozen = frozenset(draw(st.sets(st.sampled_from(names), max_size=len(names) - 1)))
    called = dict(zip(names, names, strict=True))
    if before is not None and draw(MORE):
        others = draw(st.sampled_from([names, [name.upper() for name in names]]))
        called = dict(zip(names, draw(st.permutations(others)), strict=True))
    keys: Sequence[str] = draw(st.permutations(["optimizer", "other"]))
    optimizers: Sequence[Sequence[Sequence[str]]] = [groups[:of_first], groups[of_first:]]
    if before is not None and {*called.values()} == {*names} and draw(MORE):
        # By their names all is as it was saved, and each name means another layer.
        meant = {name: layer for layer, name in called.items()}
        keys, optimizers = before.keys, [[[meant[name] for name in group] for group in each] for each in before.groups]
    return Plan(draw(st.permutations(names)), optimizers, frozen, draw(st.booleans()), called, keys)


@st.composite
def stories(draw: st.DrawFn) -> dict[str, Any]:
    names = NAMES[: draw(st.sampled_from([3, 4, 5, 2, 1]))]
    shapes = {name: draw(st.sampled_from([(3,), (2, 3), (4, 4), (4, 4)])) for name in names}
    dtypes = {name: draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])) for name in names}
    before = draw(plans(names))
    after = draw(plans(names, before))
    saved = draw(st.sampled_from(HAS_NAMES))
    if saved == "names alone":
        before, after = replace(before, named=True), replace(after, named=True, called=before.called)
    elif saved == "nothing":  # it goes by position
        before = replace(before, named=False)
        after = replace(before, declared=after.declared, frozen=after.frozen)
    groups = [group for optimizer in before.groups for group in optimizer]
    rates = {name: 0.1 * (1 + number) for number, group in enumerate(groups) for name in group}
    if draw(st.booleans()):
        rates = dict.fromkeys(names, 0.05)
    return {
        "shapes": shapes,
        "dtypes": dtypes,
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "before": before,
        "after": after,
        "saved": saved,
        "rates": rates,
        "stepped": draw(st.booleans()),
    }


class Run:
    """A model and its optimizers as a script with this plan builds them."""

    def __init__(self, story: dict[str, Any], plan: Plan) -> None:
        self.model = nn.Module()
        self.parameters = dict[str, nn.Parameter]()
        for name in plan.declared:
            layer = nn.Module()
            start = torch.linspace(-1, 1, torch.Size(story["shapes"][name]).numel()).view(story["shapes"][name])
            layer.weight = self.parameters[name] = nn.Parameter(start.to(story["dtypes"][name]))
            self.model.add_module(plan.called[name], layer)
        self.optimizers = dict[str, torch.optim.Optimizer]()
        for key, members_of_groups in zip(plan.keys, plan.groups, strict=True):
            groups = []
            for members in members_of_groups:
                params: list[Any] = [self.parameters[name] for name in members]
                if plan.named:
                    params = [(f"{plan.called[name]}.weight", self.parameters[name]) for name in members]
                groups.append({"params": params, "lr": story["rates"][members[0]]})
            if groups:
                self.optimizers[key] = OPTIMIZERS[story["optimizer"]](groups)
        self.freeze(plan.frozen)

    def freeze(self, frozen: frozenset[str]) -> None:
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name not in frozen)

    def state(self, saved: str) -> dict[str, Any]:
        model = {"module": self.model, "state dict": self.model.state_dict()}.get(saved)
        return {**({} if model is None else {"model": model}), **self.optimizers}

    def train(self, steps: range) -> None:
        for step in steps:
            for name, parameter in self.parameters.items():
                parameter.grad = None
                if parameter.requires_grad:
                    seed = NAMES.index(name) + 10 * step
                    generator = torch.Generator().manual_seed(seed)
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            for optimizer in self.optimizers.values():
                optimizer.step()

    def bits(self) -> dict[str, bytes]:
        return {
            name: parameter.detach().view(torch.uint8).numpy().tobytes()
            for name, parameter in sorted(self.parameters.items())
        }


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(story=stories())
def test_the_next_three_steps(story: dict[str, Any]) -> None:
    run = Run(story, story["before"])
    run.train(range(STEPS_BEFORE))
    resumed = Run(story, story["after"])
    if story["stepped"]:
        resumed.train(range(1))
    saved, called = story["saved"], story["after"].called
    rename = {f"model.{old}": f"model.{new}" for old, new in called.items() if old != new}
    with tempfile.TemporaryDirectory() as folder, build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as ours:
        ours.save(run.state(saved), f"{folder}/one")
        try:
            ours.load(f"{folder}/one", resumed.state(saved), strict=True, rename=rename or None)
        except CheckpointError as error:
            if saved == "nothing" and story["stepped"] and story["before"].frozen:
                assert "is missing keys" in str(error) and ".state." in str(error)
                return
            # Groups that were trained with different rates are one now: there are two answers.
            groups = [group for optimizer in story["after"].groups for group in optimizer]
            merged = [group for group in groups if len({story["rates"][name] for name in group}) > 1]
            assert merged and "lr=" in str(error) and "param_groups" in str(error), error
            return
    if "model" not in run.state(saved):
        with torch.no_grad():
            for name, parameter in run.parameters.items():
                resumed.parameters[name].copy_(parameter)
    run.freeze(story["after"].frozen)
    assert run.bits() == resumed.bits()
    steps = range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    run.train(steps)
    resumed.train(steps)
    assert run.bits() == resumed.bits()
