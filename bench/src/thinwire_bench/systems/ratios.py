"""The comparisons a run is made for: our best plan against the best peer, and pairs of equal sharding."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
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
    pairs = {f"{plan} / {peer}": pair_ratios(rows, plan, peer) for plan, peer in PAIRS}
    return {"best plan / best peer": best_ratios(rows)} | pairs


def best_ratios(rows: Sequence[SystemRow]) -> list[Ratio]:
    """The fastest plan against the fastest peer under each setting; refused rows and the bound take no part."""
    comparisons = []
    for alike in _by_setting(rows):
        plans = [row for row in alike if row.kind is SystemKind.PLAN]
        peers = [row for row in alike if row.kind is SystemKind.PEER]
        if plans and peers:
            comparisons.append(compare(min(plans, key=_time), min(peers, key=_time)))
    return comparisons


def pair_ratios(rows: Sequence[SystemRow], plan: str, peer: str) -> list[Ratio]:
    """One plan against one peer, by their labels, under each setting in which neither is missing or refused."""
    comparisons = []
    for alike in _by_setting(rows):
        by_label = {row.system: row for row in alike}
        if plan in by_label and peer in by_label:
            comparisons.append(compare(by_label[plan], by_label[peer]))
    return comparisons


def compare(plan: SystemRow, peer: SystemRow) -> Ratio:
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


def _by_setting(rows: Sequence[SystemRow]) -> Iterable[list[SystemRow]]:
    for key in dict.fromkeys((row.bandwidth, row.clip) for row in rows):
        yield [row for row in rows if (row.bandwidth, row.clip) == key and row.refused is None]


def _time(row: SystemRow) -> float:
    return row.step_ms
