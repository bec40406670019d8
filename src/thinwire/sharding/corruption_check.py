"""Compares what several ranks hold of the same thing, and names the rank that holds something else.

A processor, a memory chip or a link may compute or carry a wrong number without any error. Replicas are computed from
the same messages by the same operations, so they agree to the last bit. Each rank adds up the bits of what it holds as
integers; a single wrong bit always changes such a sum. The sums of all ranks that hold the same pieces must be equal.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.sharding.grads.unit_gradient import OwnedFragment
from thinwire.sharding.params.write_audit import sum_of_bits
from thinwire.sharding.runtime.runtime import Runtime

Sums = dict[str, int]
"""Sum of the bits of a kind of state in a unit, by what it is."""

SUMS: Final[Typed[Sums]] = Typed(Sums)

_GRADIENT: Final = "gradients"


@dataclass(frozen=True)
class Disagreement:
    """Replicas of one thing that differ.

    Attributes:
        kind: ``gradients``, ``master values`` or ``parameters``.
        unit: Name of the unit.
        wrong: Ranks that hold something else than most.
        ranks: All ranks that hold it.
    """

    kind: str
    unit: str
    wrong: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def decided(self) -> bool:
        """Whether most ranks agree, so that the others are wrong."""
        return bool(self.wrong)


def sums_of(runtime: Runtime, fragments: Sequence[OwnedFragment]) -> Sums:
    """The sums of everything on this rank of which another rank may hold a replica, after a backward; ``fragments`` are
    what this rank updates."""
    runtime.join()
    found: Sums = {}
    sharded = runtime.sharded
    for unit in sharded.units:
        own = [owned for owned in fragments if owned.unit == unit.index]
        pieces = " ".join(f"{one.name}:{one.fragment.offset}+{one.value.numel()}" for one in own)
        place = zlib.crc32(pieces.encode())
        if own:
            found[f"{_GRADIENT}|{unit.name}|{place}"] = _sum(_words(own, gradient=True))
            found[f"master values|{unit.name}|{place}"] = _sum(_words(own, gradient=False))
        found[f"parameters|{unit.name}|{sharded.shard}"] = _sum(buffer.shard for buffer in unit.buffers)
    return found


def compare(sums: Sequence[Sums], ranks: Sequence[int]) -> tuple[list[Disagreement], int]:
    """Compare the sums of ranks with these global numbers.

    Returns:
        What differs, the kinds in the order in which an error spreads; and the number of things with a replica.
    """
    holders: dict[str, dict[int, int]] = {}
    for rank, mine in zip(ranks, sums, strict=True):
        for key, value in mine.items():
            holders.setdefault(key, {})[rank] = value
    shared = {key: values for key, values in holders.items() if len(values) > 1}
    differing = [_judged(key, values) for key, values in shared.items() if len(set(values.values())) > 1]
    return sorted(differing, key=lambda one: one.kind), len(shared)


def _judged(key: str, values: Mapping[int, int]) -> Disagreement:
    kind, unit, _ = key.split("|")
    (usual, count), *_ = Counter(values.values()).most_common()
    wrong = tuple(rank for rank, value in values.items() if value != usual) if 2 * count > len(values) else ()
    return Disagreement(kind, unit, wrong, tuple(values))


def _words(fragments: Iterable[OwnedFragment], *, gradient: bool) -> Iterator[torch.Tensor]:
    for owned in fragments:
        if not gradient:
            yield owned.value.detach()
        elif not owned.source.owned.empty:
            _ = owned.source.owned.kept  # which waits for it
            yield owned.grad


def _sum(tensors: Iterable[torch.Tensor]) -> int:
    return sum(int(sum_of_bits(tensor)) for tensor in tensors)
