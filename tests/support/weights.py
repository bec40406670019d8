"""Versions of weights in a store, without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from thinwire.weights.parts import Name, Piece, encode

__all__ = ["differences", "write_version"]


def differences(held: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the same on both sides, or not there."""
    if held.keys() != wanted.keys():
        return sorted(held.keys() ^ wanted.keys())
    return [name for name, value in wanted.items() if held[name].dtype != value.dtype or not held[name].equal(value)]


def write_version(
    store: Path, version: int, pieces: Sequence[Piece], values: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    """Write a version as a trainer of one rank does: the first is an anchor, others are deltas.

    Args:
        store: Directory of the store, which need not be there.
        version: Number of the version, from 1.
        pieces: What the weights are.
        values: Gives the values of a version, by dtype.
    """
    parent = version - 1
    name = Name("000001-00000000", version, parent, "delta" if parent else "anchor", 0, 1)
    content = encode(version, pieces, values(parent) if parent else None, values(version))
    store.mkdir(exist_ok=True)
    (store / "draft").write_bytes(content)
    (store / "draft").rename(store / str(name))
