"""What every rank measures of a step, packed into numbers that one small all-reduce carries.

Means over ranks are all that travels. Sums follow from them, and maxima too, because each rank writes its
memory to a place of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from thinwire.shard import api
from thinwire.train.metrics import KINDS

_PER_KIND: Final = 4


@dataclass(frozen=True)
class Measured:
    """Measurements over all ranks.

    Attributes:
        sent: bytes sent by all ranks, by kind, ``inside`` and ``across`` nodes.
        exposed: seconds that computation waited, by kind, mean over ranks.
        codec: seconds that codecs took, by kind, mean over ranks.
        memory: bytes of the rank that has most: ``rss``, and ``cuda`` (peak allocated) on GPUs.
    """

    sent: Mapping[str, Mapping[str, int]]
    exposed: Mapping[str, float]
    codec: Mapping[str, float]
    memory: Mapping[str, int]


def pack(model: nn.Module, rank: int, world: int, device: torch.device) -> list[float]:
    """This rank's numbers since the last call.

    Args:
        model: sharded.
        rank: this rank.
        world: number of ranks.
        device: of this rank.

    Returns:
        As many on every rank.
    """
    sent, waited, worked = api.traffic(model), api.exposed(model), api.worked(model)
    words: list[float] = []
    for kind in KINDS:
        hops = sent.get(kind, {})
        words += [float(hops.get("inside", 0)), float(hops.get("across", 0)), waited.get(kind, 0.0)]
        words.append(worked.get(kind, {}).get("codec", 0.0))
    memory = [0.0] * (2 * world)
    memory[rank] = float(resident_bytes())
    if device.type == "cuda":
        memory[world + rank] = float(torch.cuda.max_memory_allocated(device))
    return words + memory


def unpack(means: Sequence[float], world: int) -> Measured:
    """Undo :func:`pack`.

    Args:
        means: means over ranks.
        world: number of ranks.

    Returns:
        The measurements.
    """
    sent: dict[str, dict[str, int]] = {}
    waited: dict[str, float] = {}
    codec: dict[str, float] = {}
    for index, kind in enumerate(KINDS):
        inside, across, waited[kind], codec[kind] = means[_PER_KIND * index : _PER_KIND * (index + 1)]
        sent[kind] = {"inside": round(inside * world), "across": round(across * world)}
    memory = [round(mean * world) for mean in means[_PER_KIND * len(KINDS) :]]
    largest = {"rss": max(memory[:world])}
    if any(memory[world:]):
        largest["cuda"] = max(memory[world:])
    return Measured(sent, waited, codec, largest)


def resident_bytes() -> int:
    """Memory of this process.

    Returns:
        Bytes resident now, where the system tells (Linux), else 0.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
