"""Conversion of floating-point numbers, block by block, with the values that torch's `to` gives.

By numpy, because torch alone needs 200 MB of memory and seconds to import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..core.spelling import invalid_choice
from ..errors import CheckpointConfigError

#: The dtypes that are converted, and to which. Other tensors stay as they are: integers, and 8-bit floats, whose scales
#: are stored apart.
FLOATS = ("float64", "float32", "float16", "bfloat16")

Cast = Callable[[memoryview], memoryview]


def check_dtype(name: str, dtype: str | None) -> None:
    """Refuse what is not a dtype to convert to.

    Args:
        name: name of the setting, for the error message
        dtype: the value; None is valid

    Raises:
        CheckpointConfigError: it is not
    """
    if dtype is None:
        return
    if dtype not in FLOATS:
        raise CheckpointConfigError(invalid_choice(name, dtype, FLOATS))


def cast_dtype(source: str, target: str | None) -> str:
    """The dtype that a tensor has after the conversion."""
    return target if target is not None and source in FLOATS else source


@functools.cache
def caster(source: str, target: str) -> Cast | None:
    """The function that converts a block of whole elements; None: nothing to do."""
    if source == target:
        return None
    import numpy

    def cast(block: memoryview) -> memoryview:
        if source == "bfloat16":  # which numpy does not have: the upper half of a float32
            values = (numpy.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = numpy.frombuffer(block, source)
        with numpy.errstate(over="ignore", invalid="ignore"):  # infinity, as torch
            if target != "float64":
                values = values.astype("float32", copy=False)  # as torch, which has no other way to the halves
            if target == "bfloat16":
                bits = values.view("<u4")
                rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
                values = numpy.where(numpy.isnan(values), 0x7FC0, rounded).astype("<u2")
            else:
                values = values.astype(target, copy=False)
        return values.view("u1").data

    return cast
