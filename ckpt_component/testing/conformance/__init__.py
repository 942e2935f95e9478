"""What storages, stagers, callers and writers must do, as classes of tests: derive from one and run pytest.

    class TestMine(StagerContract):
        @pytest.fixture
        def stager(self):
            return MyStager()

Each method is one promise that the rest of the package relies on.
"""

from __future__ import annotations

import pytest

# Before they are imported, so that a failure shows the values that were compared.
pytest.register_assert_rewrite(*(f"{__name__}.{kind}_contract" for kind in ("storage", "stager", "caller", "writer")))

from .caller_contract import CallerContract  # noqa: E402
from .connected_parts import registered  # noqa: E402
from .stager_contract import StagerContract  # noqa: E402
from .storage_contract import StorageContract  # noqa: E402
from .writer_contract import WriterContract  # noqa: E402

__all__ = ["CallerContract", "StagerContract", "StorageContract", "WriterContract", "registered"]
