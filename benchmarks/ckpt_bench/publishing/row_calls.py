"""The rows of `ckpt-bench publish`, and what measures each. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS, TRAINING, PULLS = "versions", "training", "pulls"
PUBLISH_ROWS: Mapping[str, str] = {
    VERSIONS: "publishing.version_costs:measure_versions",
    TRAINING: "publishing.training:measure_training",
    PULLS: "publishing.pulls:measure_pulls",
}
