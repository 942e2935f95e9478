from __future__ import annotations

import hydra
import pytest


@pytest.fixture
def hydra_version() -> dict[str, str]:
    """What `@hydra.main` and `initialize` need: Hydra 1.3 wants the argument, 1.4 warns about it."""
    return {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
