"""The config that words on the command line compose, checked as the factory does, without building or importing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..config.hydra.compose import compose_checkpoint
from ..config.hydra.origins import origins_of
from ..config.hydra.resolve import resolve_config
from ..config.rules import PartFacts, refuse_unfit
from ..config.schema import Checkpoint
from .config_words import split_words
from .explain_graph import facts_of
from .planning.scenario import PartSizes


@dataclass(frozen=True)
class ComposedConfig:
    """A config, and what is known of its parts.

    Attributes:
        words: the preset and the overrides that make it
        settings: what it says
        facts: what the rules ask of the parts
    """

    words: tuple[str, list[str]]
    settings: Checkpoint
    facts: PartFacts

    @cached_property
    def preset(self) -> str:
        """The preset, which a recipe may have chosen."""
        return origins_of(*self.words).preset

    @property
    def sizes(self) -> PartSizes:
        """What a plan asks of the parts; a stager of the user takes one image, unless its `arenas` say more."""
        writer, takes = self.settings.writer, self.facts.takes_snapshot
        return PartSizes(
            self.facts.stager,
            self.facts.caller,
            self.settings.stager.get("arenas", 1) if takes else 0,
            2 * writer.get("workers", 1) * writer.get("block_bytes", 0),
        )


def composed(words: Sequence[str]) -> ComposedConfig:
    """The config of a preset and overrides.

    Raises:
        CheckpointConfigError: an override is invalid, or the parts do not fit together, as the factory says
    """
    preset_and_overrides = split_words(words)
    settings = resolve_config(compose_checkpoint(*preset_and_overrides))
    facts = facts_of(settings)
    refuse_unfit(settings, facts)
    return ComposedConfig(preset_and_overrides, settings, facts)
