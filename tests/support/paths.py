"""Where tests find the checkout and the data that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["GOLDEN", "ROOT"]

ROOT: Final = Path(__file__).parents[2]
"""The checkout."""

GOLDEN: Final = ROOT / "tests" / "golden"
"""Files that were written once, and are compared with."""
