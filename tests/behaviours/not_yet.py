"""Behaviours that are not as they should be yet: by name and preset, what happens today.

The list is strict: an entry that behaves as it should fails the suite until it is removed here.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NOT_YET"]

NOT_YET: Mapping[str, Mapping[str, str]] = {}
