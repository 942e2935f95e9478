"""The states to save, identical in every run.

All values are small whole numbers, so that adding 1 to every element is exact, also in bfloat16. This allows comparing
a snapshot with its state without a second copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import torch

State = dict[str, torch.Tensor]
_Shape = tuple[str, tuple[int, ...], torch.dtype]

_KB = 1024
#: bfloat16 represents whole numbers up to 256 exactly; a row adds 1 a few dozen times at most.
_BELOW = 64


def make_state(name: str, nbytes: int | None = None, device: str = "cpu") -> State:
    """Make a state by name.

    Args:
        name: one of `STATES`
        nbytes: approximate size; tensors are left out or repeated under other keys. None: the original size.
        device: device of the tensors

    Raises:
        ValueError: there is no such state
    """
    if name not in STATES:
        raise ValueError(f"There is no state {name!r}; use {', '.join(STATES)}.")
    generator = torch.Generator("cpu").manual_seed(1)
    # One pool of random numbers for all tensors, because generating 1.5 GB of them takes longer than many rows.
    pool = torch.randint(0, _BELOW, (1 << 20,), generator=generator, dtype=torch.int64, device="cpu").to(device)
    state = {}
    for key, shape, dtype in STATES[name]() if nbytes is None else _sized(name, nbytes):
        count = 1
        for size in shape:
            count *= size
        tensor = torch.empty(count, dtype=dtype, device=device)
        for start in range(0, count, len(pool)):
            part = tensor[start : start + len(pool)]
            part.copy_(pool[: len(part)])
        state[key] = tensor.view(shape)
    return state


def _sized(name: str, nbytes: int) -> Iterator[_Shape]:
    """The tensors of the state, repeated until they have `nbytes` bytes; at least one."""
    left = nbytes
    for number in itertools.count():
        for key, shape, dtype in STATES[name]():
            yield (f"copy_{number}.{key}" if number else key), shape, dtype
            left -= math.prod(shape) * dtype.itemsize
            if left <= 0:
                return


def settle(state: Mapping[str, torch.Tensor]) -> None:
    """Wait until all work queued on the state's device is done, before a time is taken."""
    if any(tensor.is_cuda for tensor in state.values()):
        torch.cuda.synchronize()


def nbytes_of(state: Mapping[str, torch.Tensor]) -> int:
    """Total size of all tensors in bytes."""
    return sum(tensor.nbytes for tensor in state.values())


def _large() -> Iterator[_Shape]:
    yield from _with_adam(_gpt2_small(), torch.float32)


def _bf16_mixed() -> Iterator[_Shape]:
    for key, shape in _gpt2_small():
        yield f"model.{key}", shape, torch.bfloat16
        for part in ("master", "exp_avg", "exp_avg_sq"):
            yield f"optimizer.{part}.{key}", shape, torch.float32
        yield f"optimizer.step.{key}", (), torch.float32


def _many_small() -> Iterator[_Shape]:
    for number, count in enumerate(_counts(20_000, 1 * _KB, 64 * _KB)):
        yield f"layer.{number}.weight", (count,), torch.float32


def _moe() -> Iterator[_Shape]:
    # Per expert two matrices and two biases, in 50 layers of 50 experts: 10,000 tensors from 1 KB to 0.5 MB.
    for layer in range(50):
        for expert in range(50):
            key = f"layers.{layer}.experts.{expert}"
            wide = 512 if expert % 2 else 256
            yield f"{key}.w1", (wide, 256), torch.bfloat16
            yield f"{key}.w2", (256, wide), torch.bfloat16
            yield f"{key}.b1", (wide,), torch.float32
            yield f"{key}.b2", (256,), torch.float32


def _tiny() -> Iterator[_Shape]:
    for number, count in enumerate(_counts(20, 1 * _KB, 64 * _KB)):
        yield f"layer.{number}.weight", (count,), torch.float32


def _counts(tensors: int, low: int, high: int) -> list[int]:
    """Numbers of float32 elements, so that the tensors have from `low` to `high` bytes."""
    generator = torch.Generator("cpu").manual_seed(1)
    counts = torch.randint(low // 4, high // 4 + 1, (tensors,), generator=generator, dtype=torch.int64, device="cpu")
    return list(map(int, counts))


def _weights() -> Iterator[_Shape]:
    for key, shape in _gpt2(width=1024, layers=16):
        yield f"model.{key}", shape, torch.bfloat16


def _gpt2_small() -> Iterator[tuple[str, tuple[int, ...]]]:
    return _gpt2(width=768, layers=12)


def _gpt2(width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (50257, width)
    yield "wpe.weight", (1024, width)
    for layer in range(layers):
        key = f"h.{layer}"
        for norm in ("ln_1", "ln_2"):
            yield f"{key}.{norm}.weight", (width,)
            yield f"{key}.{norm}.bias", (width,)
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            yield f"{key}.{name}.weight", (rows, columns)
            yield f"{key}.{name}.bias", (columns,)
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


def _with_adam(parameters: Iterator[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> Iterator[_Shape]:
    for key, shape in parameters:
        yield f"model.{key}", shape, dtype
        yield f"optimizer.exp_avg.{key}", shape, dtype
        yield f"optimizer.exp_avg_sq.{key}", shape, dtype
        yield f"optimizer.step.{key}", (), torch.float32


#: Name -> its tensors' keys, shapes and dtypes.
STATES: Mapping[str, Callable[[], Iterator[_Shape]]] = {
    "large": _large,  # GPT-2 small and its Adam moments: 592 tensors, 1.49 GB
    "many_small": _many_small,  # 20,000 tensors of 1 to 64 KB, 0.67 GB
    "moe": _moe,  # 10,000 tensors from 1 KB to 0.25 MB
    "bf16_mixed": _bf16_mixed,  # bf16 weights, float32 master weights and moments
    "weights": _weights,  # bf16 weights alone: 0.51 GB, as runs publish them
    "tiny": _tiny,  # for tests
}
