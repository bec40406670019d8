"""One plan with every setting of its overlap switches, in one process: the systems of ``thinwire bench overlap``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire_bench.peers.interface import Place, System
from thinwire_bench.peers.system import LEARNING_RATE
from thinwire_bench.peers.workload import batches, make_model

__all__ = ["switches"]


@final
class _Variant:
    """A model of its own under one setting of the switches, with data of its own: all variants train alike."""

    def __init__(self, place: Place, options: Mapping[str, Any], overlap: Mapping[str, bool]) -> None:
        plan = tw.Plan.from_toml(options["plan"]).with_(overlap=dict(overlap))
        self.model = tw.shard(make_model(options), plan)
        self._optim = tw.optimizer(self.model, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
        self._batches = batches(options, place.rank)

    def step(self, num_micro_batches: int) -> float:
        """Train one step; the mean loss of its micro-batches on this rank."""
        losses = []
        for ids in tw.micro_batches(self.model, [next(self._batches) for _ in range(num_micro_batches)]):
            loss = self.model(ids[:, :-1], labels=ids[:, 1:]).loss / num_micro_batches
            loss.backward()
            losses.append(loss.detach())
        self._optim.step()
        self._optim.zero_grad()
        return float(torch.stack(losses).sum())

    def traced_step(self, num_micro_batches: int, path: Path) -> float:
        """Train one step and write what every lane did meanwhile."""
        with tw.timeline(self.model) as timeline:
            loss = self.step(num_micro_batches)
        path.write_text(json.dumps([asdict(span) for span in timeline.spans]), encoding="utf-8")
        return loss


@final
class SwitchSystem(System):
    """A plan's variants; every step names one."""

    def __init__(self, place: Place, options: Mapping[str, Any]) -> None:
        self._rank = place.rank
        self._variants = {name: _Variant(place, options, overlap) for name, overlap in options["settings"].items()}
        self._current = next(iter(self._variants.values()))

    def step(self, options: Mapping[str, Any]) -> float:
        self._current = self._variants[options["setting"]]
        if options.get("trace") is None:
            return self._current.step(options["micro_batches"])
        return self._current.traced_step(options["micro_batches"], Path(options["trace"]) / f"rank-{self._rank}.json")

    def settle(self) -> None:
        runtime(self._current.model).lanes.drain()

    def waited(self) -> dict[str, float]:
        return tw.exposed(self._current.model)


def switches(place: Place, options: Mapping[str, Any]) -> System:
    """Build the variants of a plan.

    Args:
        place: Place of this rank.
        options: Options of the workload; ``plan`` as TOML; ``settings``, overlap switches by the name of a setting.
    """
    return SwitchSystem(place, options)
