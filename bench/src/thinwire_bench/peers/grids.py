"""Plans with tensor and pipeline parallelism as systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.train.data.samples import Batch
from thinwire.train.models.common import cross_entropy
from thinwire_bench.peers.interface import Place, System
from thinwire_bench.peers.system import LEARNING_RATE
from thinwire_bench.peers.workload import batches, make_model

__all__ = ["grid"]


@final
class GridSystem(System):
    """A model over stages, data-parallel and tensor-parallel ranks."""

    def __init__(self, model: tw.ParallelModel, data: Iterator[torch.Tensor]) -> None:
        self._model, self._data = model, data
        self._optim = model.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)

    def step(self, options: Mapping[str, Any]) -> float:
        taken = islice(self._data, self._model.plan.micro_batches)
        loss = self._model.step([Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in taken])
        if options.get("clip") is not None:
            self._model.clip_grad_norm_(options["clip"])
        self._optim.step()
        self._optim.zero_grad()
        # A mean over all ranks is to be one over those that know the loss.
        return float(loss) * self._model.plan.pp if self._model.knows_loss else 0.0

    def settle(self) -> None:
        for chunk in self._model.chunks:
            runtime(chunk).lanes.drain()

    def sent(self) -> dict[str, int]:
        by_axis = {"dp": sum(sum(hops.values()) for c in self._model.chunks for hops in tw.traffic(c).values())}
        for axis, traffic in self._model.axis_traffic().items():
            by_axis[f"{axis} {' and '.join(sorted(traffic.codecs)) or 'none'}"] = traffic.sent
        return by_axis


def grid(place: Place, options: Mapping[str, Any]) -> System:
    """Build the system of a plan with ``tp`` or ``pp``.

    Args:
        place: Place of this rank.
        options: Options of the workload; ``plan`` as TOML; ``encoded``, whether its axes use thinwire at all.
    """
    chosen = tw.Plan.from_toml(options["plan"])
    model = tw.parallelize(make_model(options), chosen, loss=cross_entropy, encoded=options["encoded"])
    return GridSystem(model, batches(options, model.grid.data))
