"""Threads of the host's processor, which ranks of a node divide among themselves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def threads_of_updates(ranks: int | None) -> Iterator[None]:
    """Context in which torch computes on the processor with this rank's part of the cores, except one: that is for the
    thread that feeds the device.

    Args:
        ranks: Ranks of the node; ``None``: threads stay as they are.
    """
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(before if ranks is None else max(1, cores // ranks - 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
