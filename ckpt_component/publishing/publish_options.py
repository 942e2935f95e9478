"""How weights are published."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from ..core.spelling import invalid_choice
from ..errors import CheckpointConfigError
from ..exporting.export import ExportOptions

#: Values of `delta`, and the encoding that each is.
DELTAS = {"auto": "xor", "overwrite": "overwrite", "off": None}


@dataclass(frozen=True)
class PublishOptions:
    """How to publish.

    Attributes:
        export: which tensors, under which names and as what, in the format `hf`
        delta: `auto`: the changes of the version before, as small as they get; `overwrite`: so that they may be applied
            again; `off`: each version is whole
        whole_every: after so many deltas comes a whole version
        keep: how many of the newest versions are kept, with what they build on
    """

    export: ExportOptions
    delta: str = "auto"
    whole_every: int = 20
    keep: int = 10

    def __post_init__(self) -> None:
        if self.delta not in DELTAS:
            raise CheckpointConfigError(invalid_choice("delta", self.delta, tuple(DELTAS), form="{1}"))
        if self.export.format != "hf":
            raise CheckpointConfigError(f"Versions have the format hf, and not {self.export.format}.")
        for name in ("whole_every", "keep"):
            if getattr(self, name) < 1:
                raise CheckpointConfigError(f"{name} is {getattr(self, name)}; it is at least 1.")

    @property
    def digest(self) -> str:
        """Of what selects and casts the weights."""
        export = self.export
        values = [export.prefix, dict(export.rename), list(export.ignore), export.dtype, export.max_shard_bytes]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
