from __future__ import annotations

import sys
from pathlib import Path

# Where started processes find `gated_fs`: they get this path with the rest of sys.path.
sys.path.insert(0, str(Path(__file__).parent))
