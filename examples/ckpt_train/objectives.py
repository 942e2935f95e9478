"""What a job returns to a sweeper such as Optuna: one figure of its `result.json`, or several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ckpt_component.config.hydra.hydra_errors import HydraConfigError
from ckpt_component.config.hydra.overrides import parse_override
from ckpt_component.core.spelling import invalid_choice

logger = logging.getLogger(__name__)

#: Figures that a sweeper can minimise or maximise.
OBJECTIVES = (
    *("stall_s", "first_stall_s", "staged_s", "durable_s", "gbps"),
    *("step_s", "loss", "validation_loss"),
)


def objective_names(config: DictConfig) -> list[str]:
    """The names below `objectives` of a job's config; one name may stand without a list.

    Raises:
        CheckpointConfigError: there is no such figure, or none is named
    """
    value = config.get("objectives", "stall_s")
    names = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else [value]
    for name in names if isinstance(names, list) else []:
        if name not in OBJECTIVES:
            raise HydraConfigError(invalid_choice("objectives", name, OBJECTIVES))
    if not isinstance(names, list) or not names:
        raise HydraConfigError("objectives names no figure; name one, or several: objectives=[stall_s,durable_s]")
    return [str(name) for name in names]


def refuse_typos(words: Sequence[str]) -> None:
    """Refuse a name on the command line that is no figure, before a sweep begins: each of its jobs would refuse it.

    Raises:
        CheckpointConfigError: as `objective_names`
    """
    for word in words:
        if word.lstrip("+").startswith("objectives="):
            override = parse_override(word)
            if not override.is_sweep_override():
                objective_names(OmegaConf.create({"objectives": override.value()}))


def objectives_of(names: list[str], figures: Mapping[str, Any]) -> float | list[float] | None:
    """The values that the job returns, in the order of their names.

    A run with one save has no `stall_s`, which is of later saves, and gives that of its only save.

    Returns:
        One number for one name, a list for several. None if one has no value, which sweepers take for a failed job: a
        job that saves nothing has no stall, and must not win over those that save.
    """
    values = [figures.get("first_stall_s") if _is_of_first(name, figures) else figures.get(name) for name in names]
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if missing:
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            logger.info("this job has no %s, so it returns nothing to a sweeper", " and no ".join(missing))
        return None
    numbers = [float(value) for value in values if value is not None]
    return numbers if len(names) > 1 else numbers[0]


def _is_of_first(name: str, figures: Mapping[str, Any]) -> bool:
    return name == "stall_s" and figures.get(name) is None
