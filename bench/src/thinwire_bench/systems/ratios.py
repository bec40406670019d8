"""The comparisons a run is made for: our best plan against the best peer, and pairs of equal sharding."""

from __future__ import annotations

import statistics
from collections.abc import Sequence, Set
from dataclasses import dataclass

from thinwire_bench.peers.interface import SystemKind
from thinwire_bench.systems.rows import SystemRow

PAIRS = (("tw:zero3", "fsdp2"), ("tw:zeropp", "fsdp2"))
"""A plan and the peer that shards as it does."""


@dataclass(frozen=True)
class Ratio:
    """Our time over a peer's under one setting; below 1 we are faster.

    Attributes:
        bandwidth: Bandwidth of the links, as the user wrote it.
        clip: Bound on the gradient norm; None does not clip.
        plan: Label of thinwire's plan.
        peer: Label of the other system.
        of_medians: Median step of the plan over that of the peer.
        median: Median of the ratios within rounds.
        smallest: Smallest ratio within a round.
        largest: Largest ratio within a round.
    """

    bandwidth: str
    clip: float | None
    plan: str
    peer: str
    of_medians: float
    median: float
    smallest: float
    largest: float


def goals(rows: Sequence[SystemRow]) -> dict[str, list[Ratio]]:
    """All comparisons that the rows allow, by name."""
    plans, peers = ({row.system for row in rows if row.kind is kind} for kind in (SystemKind.PLAN, SystemKind.PEER))
    pairs = {f"{plan} / {peer}": ratios(rows, {plan}, {peer}) for plan, peer in PAIRS}
    return {"best plan / best peer": ratios(rows, plans, peers)} | pairs


def ratios(rows: Sequence[SystemRow], plans: Set[str], peers: Set[str]) -> list[Ratio]:
    """The fastest of some plans against the fastest of some peers, by their labels, under each setting in which there
    are both; refused rows take no part."""
    comparisons = []
    for key in dict.fromkeys((row.bandwidth, row.clip) for row in rows):
        alike = [row for row in rows if (row.bandwidth, row.clip) == key and row.refused is None]
        ours, theirs = (
            min((row for row in alike if row.system in labels), key=lambda row: row.step_ms, default=None)
            for labels in (plans, peers)
        )
        if ours is not None and theirs is not None:
            comparisons.append(_compared(ours, theirs))
    return comparisons


def _compared(plan: SystemRow, peer: SystemRow) -> Ratio:
    """Two systems under one setting."""
    by_round = [ours / theirs for ours, theirs in zip(plan.samples, peer.samples, strict=True)]
    return Ratio(
        bandwidth=plan.bandwidth,
        clip=plan.clip,
        plan=plan.system,
        peer=peer.system,
        of_medians=plan.step_ms / peer.step_ms,
        median=statistics.median(by_round),
        smallest=min(by_round),
        largest=max(by_round),
    )
