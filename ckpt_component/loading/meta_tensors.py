"""Give modules that were built on the meta device memory, which a load fills.

Such a module has shapes and dtypes, and nothing in it was initialised that a load would overwrite. Each of its storages
gets one with memory, so that tied weights stay tied. The module gets them when everything was read on all ranks: until
then it stays on the meta device, so that an older checkpoint can be tried, or the script can initialise it. Its
parameters stay the objects that optimizers, hooks and wrappers have.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointConfigError, CheckpointLoadError, first_keys
from ..formats.source import tensor_on
from ..state.flatten import FlatState
from ..state.parameter_names import optimizers_of
from ..state.paths import Path, key_of
from ..state.shards import dense_parts, mesh_of
from ..state.tensors import has_plain_bytes
from ..state.wrapped_modules import CanonicalNames

#: Where autograd keeps the hooks of a tensor.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Held(NamedTuple):
    """A parameter or buffer on the meta device, its key, and its dense parts."""

    tensor: torch.Tensor
    key: str
    parts: Sequence[torch.Tensor]


class MetaTensors:
    """The parameters and buffers on the meta device of the modules in a target, and their memory.

    Args:
        modules: the modules by path
        device: where they get memory; None: on the default device, or that of the mesh of a module with DTensors
    """

    def __init__(self, modules: Iterable[tuple[Path, torch.nn.Module]], device: torch.device | None) -> None:
        self._device = device
        self._modules = [*modules]
        self._held: dict[int, _Held] = {}
        #: By what identifies a storage on the meta device: that storage, and the device of its memory.
        self._places: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}
        #: What has memory, as of `_form_of`.
        self._filled: set[Any] = set()
        for path, module in self._modules:
            tensors = {name: each for name, each in _tensors_of(module) if not is_lazy(each) and each.is_meta}
            names = CanonicalNames(module, tensors).of
            for name, tensor in tensors.items():
                self._held.setdefault(id(tensor), _Held(tensor, key_of((*path, names[name])), dense_parts(tensor)))
            if tensors:
                place = self._default_for(tensors.values())
                for tensor in tensors.values():
                    self._place(tensor, place)
        self._forms = {_form_of(part) for held in self._held.values() for part in _plain_parts(held.tensor)}

    def has(self, part: torch.Tensor) -> bool:
        """Whether a dense tensor of the target is a parameter or buffer, or what one is made of."""
        return _form_of(part) in self._forms

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or buffer itself, and not another tensor of the same form."""
        return id(tensor) in self._held

    def place_state(self, state: torch.Tensor, parameter: torch.Tensor) -> None:
        """Have a tensor of an optimizer's state get memory where its parameter does."""
        known = (self._places.get(part.untyped_storage()._cdata) for part in _plain_parts(parameter))
        place = next(filter(None, known), None)
        self._place(state, self._default_for([parameter]) if place is None else place[1])

    @torch.inference_mode(False)
    @torch.no_grad()
    def filled(self, flat: FlatState) -> FlatState:
        """A target in which the tensors on the meta device are others, with memory, which are to be filled.

        Raises:
            CheckpointLoadError: there is no memory on the device, or a parameter could not be given any
        """
        made = dict[int, torch.Tensor]()

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta and id(tensor) not in made:
                made[id(tensor)] = self._with_memory(tensor)
            return made.get(id(tensor), tensor)

        self._filled.update(_form_of(tensor) for tensor in flat.tensors if tensor.is_meta)
        self._refuse_referenced()
        try:
            return replace(
                flat,
                tensors=[*map(real, flat.tensors)],
                placed={number: real(whole) for number, whole in flat.placed.items()},
                elsewhere={
                    path: real(whole) if all(map(self.has, _plain_parts(whole))) else whole
                    for path, whole in flat.elsewhere.items()
                },
                made={path: real(whole) for path, whole in flat.made.items()},
            )
        except (RuntimeError, AssertionError) as error:  # as torch says that there is no such device
            raise CheckpointLoadError(
                f"The model on the meta device got no memory: {str(error).rstrip('. ')}; see checkpoint.load.device."
            ) from error

    @torch.inference_mode(False)
    @torch.no_grad()
    def like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor with memory, of a parameter's shape and placements, where the parameter gets its own."""
        shape = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        self.place_state(shape, tensor)
        return self._with_memory(shape)

    @torch.inference_mode(False)
    @torch.no_grad()
    def give(self) -> None:
        """Give the parameters and buffers the memory that was filled.

        Raises:
            CheckpointLoadError: one cannot get it; all stay on the meta device
        """
        given: list[tuple[torch.Tensor, torch.Tensor]] = []
        for module in self._recurrent():
            module._flat_weight_refs = []  # as in its own `_apply`
        try:
            for held in filter(self._is_filled, self._held.values()):
                new = self._with_memory(held.tensor)
                if isinstance(held.tensor, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=held.tensor.requires_grad)
                try:
                    _swap(held.tensor, new)
                except RuntimeError as error:
                    for before, meta in reversed(given):
                        _swap(before, meta)
                    raise CheckpointLoadError(
                        f"'{held.key}' cannot get memory in place of the meta device: {str(error).rstrip('. ')}; give "
                        "the module memory with to_empty(device=...) before the load."
                    ) from error
                given.append((held.tensor, new))
        finally:
            for module in self._recurrent():
                module._init_flat_weights()

    def left(self, flat: FlatState) -> Iterator[str]:
        """What is still on the meta device after a load, a sentence each, to log."""
        keys = [held.key for held in self._held.values() if held.tensor.is_meta]
        if keys:  # buffers that are not persistent
            text = "still on the meta device: %s; checkpoints do not have them, so set them before the next step"
            yield text % first_keys(keys)
        for path, optimizer in optimizers_of(flat):
            count = sum(each.is_meta for group in optimizer.param_groups for each in group["params"])
            if count:
                yield (
                    f"'{key_of(path)}' has {count} parameter(s) on the meta device that are in no module of the state; "
                    "load their module with it"
                )

    def _recurrent(self) -> Iterator[Any]:
        """The modules that hold weak references to their weights."""
        for _, module in self._modules:
            yield from (each for each in module.modules() if isinstance(each, torch.nn.RNNBase))

    def _refuse_referenced(self) -> None:
        """Refuse parameters and buffers that could not stay the same objects."""
        own = {id(each) for module in self._recurrent() for each in module._flat_weight_refs}
        held = filter(self._is_filled, self._held.values())
        keys = [
            key
            for tensor, key, _ in held
            if {*map(id, weakref.getweakrefs(tensor))} - own or tensor._use_count() > 1  # type: ignore[attr-defined]
        ]
        if keys:
            raise CheckpointLoadError(
                f"{first_keys(keys)} cannot get memory in place of the meta device, because something refers to what "
                "is there, such as a weak reference, a graph or DistributedDataParallel; load before that is made, or "
                "give the module memory with to_empty(device=...)."
            )

    def _default_for(self, tensors: Iterable[torch.Tensor]) -> torch.device:
        """Where tensors that are used together get memory."""
        mesh = next((mesh for mesh in map(mesh_of, tensors) if mesh is not None), None)
        # `torch.get_default_device()` does not see `with torch.device(...)` in every version of torch.
        device = self._device or (torch.empty(0).device if mesh is None else torch.device(mesh.device_type))
        if device.type == "meta":
            raise CheckpointLoadError(
                "The model is on the meta device, and so is torch's default device: name one in checkpoint.load.device."
            )
        return device

    def _place(self, tensor: torch.Tensor, device: torch.device) -> None:
        for part in _plain_parts(tensor):
            storage = part.untyped_storage()
            self._places.setdefault(storage._cdata, (storage, device))

    def _with_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same form with memory; those that share theirs on the meta device share it."""
        if not has_plain_bytes(tensor):
            kind: Any = type(tensor)
            inner, context = _inside(tensor)
            inner |= {name: self._with_memory(each) for name, each in inner.items() if isinstance(each, torch.Tensor)}
            made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
            return made
        number = tensor.untyped_storage()._cdata
        if number not in self._memory:
            storage, device = self._places[number]
            self._memory[number] = torch.UntypedStorage(storage.nbytes(), device=device)
        memory = self._memory[number]
        return tensor_on(memory, tensor.dtype, tensor.size(), int(tensor.storage_offset()), tensor.stride())

    def _is_filled(self, held: _Held) -> bool:
        return all(_form_of(part) in self._filled for part in held.parts)


def checked_device(name: str, value: Any) -> torch.device | None:
    """The device that a setting names; None: it names none.

    Args:
        name: name of the setting, for the error message
        value: its value

    Raises:
        CheckpointConfigError: it is not a device with memory
    """
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise CheckpointConfigError(f"{name}={value!r}: {str(error).splitlines()[0]}; try cpu or cuda.") from error
    if device.type == "meta":
        raise CheckpointConfigError(f"{name}=meta has no memory; try cpu or cuda.")
    return device


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with a storage that a tensor is made of, also those of a rank that holds no part of a DTensor."""
    if has_plain_bytes(tensor):
        return [tensor]
    inner = _inside(tensor)[0].values()
    return [part for each in inner if isinstance(each, torch.Tensor) for part in _plain_parts(each)]


def _inside(tensor: torch.Tensor) -> tuple[dict[str, Any], Any]:
    """What a tensor is made of, by name, a DTensor's mesh too; and what else its class makes it from."""
    whole: Any = tensor
    names, context = whole.__tensor_flatten__()
    return {name: getattr(whole, name) for name in names}, context


def _form_of(part: torch.Tensor) -> Any:
    """What identifies a dense tensor on the meta device: its storage, and its view of it."""
    return part.untyped_storage()._cdata, part.storage_offset(), part.dtype, part.shape, part.stride()


def _swap(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Have a tensor be another one, with its own class, attributes and hooks."""
    kind, attributes = type(tensor), dict(vars(tensor))
    for name in _HOOKS:
        if getattr(tensor, name) is not None:
            setattr(new, name, getattr(tensor, name))
    torch.utils.swap_tensors(tensor, new)
    if type(tensor) is not kind:
        tensor.__class__ = kind
    for name, value in attributes.items():
        vars(tensor).setdefault(name, value)
