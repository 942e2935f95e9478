"""The state that an object is given back: what the checkpoint has, and what the object has beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..state.flatten import FlatState, Path, StateDict, key_of, unflatten
from .forms import Forms
from .source import Source


def object_state(
    path: Path,
    flat: FlatState,
    source: Source,
    forms: Forms,
    values: Mapping[Path, Any],
    missing: Collection[str],
) -> StateDict:
    """Put it together. What the checkpoint lacks keeps its value, where there is a place left for it.

    Args:
        path: where the object stands.
        flat: the target; its tensors that the checkpoint has are filled already.
        source: the checkpoint.
        forms: of the two.
        values: what was loaded beside those, by path.
        missing: keys of the target that the checkpoint lacks.

    Raises:
        TypeError: the two make up no state.
    """
    depth = len(path)
    new = {place[depth:]: value for place, value in values.items() if place[:depth] == path}
    lists = {place for place, kind in flat.containers if kind == "list"}
    state: dict[Path, Any] = {}

    def put(place: Path, value: Any) -> None:
        """Keep what the object has now, but no element of a list that the checkpoint has, and nothing in its way."""
        if missing and key_of(place) in missing:
            inner = [place[:length] for length in range(depth + 1, len(place))]
            if key_of(place) in forms.below or any(
                around[depth:] in new or (forms.has_container(around) and (around in lists or forms.has_list(around)))
                for around in inner
            ):
                return
        state[place[depth:]] = value

    for number, (place, tensor) in enumerate(zip(flat.tensor_paths, flat.tensors, strict=True)):
        if place[:depth] == path:
            put(place, flat.placed.get(number, tensor))
    objects = zip(flat.object_paths, flat.objects, strict=True)
    for place, value in [*objects, *flat.elsewhere.items()]:
        if place[:depth] == path:
            put(place, value)
    state.update(new)
    containers = {
        place[depth:]: kind
        for place, kind in flat.containers
        if place[:depth] == path and not (kind == "list" and forms.has_container(place))
    }
    containers.update((place[depth:], kind) for place, kind in source.index.containers if place[:depth] == path)
    filled = {place[:length] for place in state for length in range(1, len(place) + 1)}
    kept = [
        (place, kind)
        for place, kind in containers.items()
        if (kind != "empty" or place not in filled)
        # A value that was loaded as a whole has its containers already.
        and not any(place[:length] in new for length in range(1, len(place) + 1))
    ]
    return unflatten(state, kept)
