"""Thinwire's own plans as systems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

import thinwire as tw
from thinwire.program import Scope, exchange_operations
from thinwire.sharding.api import runtime
from thinwire_bench.peers.interface import Place, System
from thinwire_bench.peers.system import LEARNING_RATE, TorchSystem
from thinwire_bench.peers.workload import batches, make_model


@final
class PlanSystem(TorchSystem):
    """A model sharded by a plan."""

    def _clip(self, max_norm: float) -> None:
        tw.clip_grad_norm_(self._model, max_norm)

    def settle(self) -> None:
        # Updated parameters still travel after a step; they must not share the links with the next system.
        runtime(self._model).drain()

    def predicted(self) -> int | None:
        programs = runtime(self._model).programs
        sent = sum(sent[Scope.ACROSS] for sent in programs.program(1).traffic().values())
        islands = programs.plan.islands
        if islands is None:
            return sent
        exchanges = [
            operation
            for fragment in range(islands.fragments)
            for operation in exchange_operations(programs.plan, programs.infos, fragment, programs.position)
        ]
        exchanged = sum(hop.sent for operation in exchanges for hop in operation.hops if hop.scope is Scope.ACROSS)
        return sent + exchanged // islands.every

    def waited(self) -> dict[str, float]:
        return tw.exposed(self._model)


def plan(place: Place, options: Mapping[str, Any]) -> System:
    """Build the system of a plan, which the options hold as TOML."""
    model = tw.shard(make_model(options), tw.Plan.from_toml(options["plan"]))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return PlanSystem(model, optim, batches(options, place.rank))
