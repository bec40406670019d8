"""Collectives of torch under their names in version 2.13, for any installed version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional

__all__ = [
    "all_gather_single",
    "functional_gather_single",
    "functional_scatter_single",
    "functional_scatter_single_coalesced",
    "reduce_scatter_single",
]

Collective = Callable[..., Any]


def _named(module: Any, name: str, older: str) -> Collective:
    found: Collective = getattr(module, name, None) or getattr(module, older)
    return found


all_gather_single = _named(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _named(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_gather_single = _named(functional, "all_gather_single", "all_gather_tensor")
functional_scatter_single = _named(functional, "reduce_scatter_single", "reduce_scatter_tensor")
functional_scatter_single_coalesced = _named(
    functional, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)
