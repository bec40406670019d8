"""Seeds of codecs that round at random."""

from __future__ import annotations

_ZERO = 0x9E3779B9
"""Stands for the lower half of a long seed if that is 0, which would leave no trace."""


def fold_seed(seed: int) -> int:
    """Fold a seed of any size to 32 bits so that different seeds rarely collide."""
    remaining = seed % (1 << 64)
    folded = _ZERO if remaining and not remaining & 0xFFFFFFFF else 0
    while remaining:
        folded = _mix(folded ^ (remaining & 0xFFFFFFFF))
        remaining >>= 32
    return folded


def slice_seed(seed: int, index: int) -> int:
    """The folded seed of slice ``index`` of a tensor whose folded seed is ``seed``."""
    return seed if index == 0 else _mix(seed ^ _mix(index))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return value ^ (value >> 15)
