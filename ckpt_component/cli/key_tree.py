"""Keys of a checkpoint as a tree: totals by prefix, and numbered siblings of equal contents folded into one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..formats import Entry

#: How many ranges of numbers a folded name shows.
_SHOWN = 3


@dataclass(frozen=True)
class Line:
    """A line of the tree.

    Attributes:
        depth: how deep it is indented
        name: its part of the key; of folded siblings all numbers, such as `0-11`
        alike: how many siblings it stands for
        dtype: dtype of the tensor, or of all tensors below; `mixed`; empty for objects
        entry: the entry, of folded siblings the first; None: it is a prefix with entries below
        tensors, objects: how many there are, in all siblings
        nbytes: bytes of all siblings
    """

    depth: int
    name: str
    alike: int
    dtype: str
    entry: Entry | None
    tensors: int
    objects: int
    nbytes: int


@dataclass
class _Node:
    entry: Entry | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    tensors: int = 0
    objects: int = 0
    nbytes: int = 0
    dtypes: frozenset[str] = frozenset()
    #: Nodes with equal contents have equal numbers.
    form: int = 0


def lines_of(entries: Iterable[Entry], depth: int | None = None) -> Iterator[Line]:
    """The lines of the tree of some entries.

    Args:
        entries: the entries
        depth: show this many levels; None: all
    """
    root = _Node()
    for entry in entries:
        node = root
        for part in _parts(entry):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node()
            node = child
        node.entry = entry
    _total(root, {})
    yield from _lines(root, 0, depth)


def _parts(entry: Entry) -> Iterator[str]:
    """The parts of a key: the names in the state, those with dots as of modules; a float such as 1.5 is one part."""
    for part in entry.path:
        yield from part.split(".") if isinstance(part, str) else [str(part)]


def _total(node: _Node, forms: dict[Any, int]) -> None:
    """Add up what is below a node; recursion is as deep as the longest key."""
    form: list[Any] = []
    if node.entry is not None:
        entry = node.entry
        node.tensors, node.objects = (1, 0) if entry.kind == "tensor" else (0, 1)
        node.nbytes = entry.nbytes
        node.dtypes = frozenset([entry.dtype] if entry.dtype else [])
        form.append((entry.dtype, entry.shape))
    for name, child in node.children.items():
        _total(child, forms)
        node.tensors += child.tensors
        node.objects += child.objects
        node.nbytes += child.nbytes
        node.dtypes |= child.dtypes
        form.append((name, child.form))
    node.form = forms.setdefault(tuple(form), len(forms))


def _lines(node: _Node, level: int, depth: int | None) -> Iterator[Line]:
    for name, first, group in _folded(node):
        while len(first.children) == 1 and first.entry is None:  # a chain is one line
            ((part, first),) = first.children.items()
            name += f".{part}"
        dtype = next(iter(first.dtypes), "") if len(first.dtypes) < 2 else "mixed"
        tensors, objects, nbytes = (
            sum(getattr(each, total) for each in group) for total in ("tensors", "objects", "nbytes")
        )
        yield Line(level, name, len(group), dtype, None if first.children else first.entry, tensors, objects, nbytes)
        if first.children and (depth is None or level + 1 < depth):
            yield from _lines(first, level + 1, depth)


def _folded(node: _Node) -> Iterator[tuple[str, _Node, Sequence[_Node]]]:
    """The children of a node: numbered ones of equal form together, as the first of them."""
    numbered: dict[int, list[int]] = {}
    for name, child in node.children.items():
        if name.isdecimal() and str(int(name)) == name:
            numbered.setdefault(child.form, []).append(int(name))
    for name, child in node.children.items():
        numbers = numbered.get(child.form, []) if name.isdecimal() and str(int(name)) == name else []
        if len(numbers) < 2:
            yield name, child, [child]
        elif int(name) == numbers[0]:
            yield ranges_text(sorted(numbers)), child, [node.children[str(number)] for number in numbers]


def shape_text(shape: Sequence[int]) -> str:
    """`3072x1024`; `scalar` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: `0-11`, `0,2,5-7`; of many ranges the first ones."""
    ranges = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(ranges if len(ranges) <= _SHOWN else [*ranges[: _SHOWN - 1], "...", ranges[-1]])
