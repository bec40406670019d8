"""DeepSpeed's ZeRO, configured to be as fast as it can be on these ranks.

On CPU DeepSpeed calls gloo and waits for each collective: its streams are CUDA's. Overlap is therefore off: asked for,
it costs a second buffer and copies, and overlaps nothing. Every setting here was measured against its alternatives,
unshaped and at 1 Gbit/s; the faster one is kept.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import nn

from thinwire_bench.peers.interface import Place, System
from thinwire_bench.peers.system import fused_adamw
from thinwire_bench.peers.workload import batches, make_model


@final
class DeepSpeedSystem(System):
    """A model in DeepSpeed's engine."""

    def __init__(self, model: nn.Module, config: dict[str, Any], place: Place, options: Mapping[str, Any]) -> None:
        # Its import starts a thread, which a server that forks must not have.
        package = importlib.import_module("deepspeed")
        self._engine, *_ = package.initialize(model=model, optimizer=fused_adamw(model.parameters()), config=config)
        self._batches = batches(options, place.rank)

    def step(self, options: Mapping[str, Any]) -> float:
        # Both of its optimizers read these two when they step.
        self._engine.optimizer.clip_grad = options.get("clip") or 0.0
        self._engine.optimizer.compute_grad_norm = options.get("clip") is not None
        ids = next(self._batches)
        loss = self._engine(ids[:, :-1], labels=ids[:, 1:]).loss
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())


def deepspeed(place: Place, options: Mapping[str, Any]) -> System:
    """Build DeepSpeed's ZeRO of ``stage`` 1 to 3."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed looks for ninja, which is installed next to the interpreter, each time it loads its compiled module.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return DeepSpeedSystem(make_model(options), _configuration(options["stage"]), place, options)


def _configuration(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a stage; sizes are numbers of elements."""
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        # Its default, half a billion, reduces this model in one piece at the end of the backward.
        "reduce_bucket_size": 5_000_000,
        # Its default reduces every bucket to all ranks although one rank keeps it.
        "use_multi_rank_bucket_allreduce": False,
    }
    if stage == 3:
        # Its defaults never free a parameter of a model this small. A block has 3.2 million: two are live, one of
        # them fetched ahead; the last block stays from forward to backward, and norms are never cut.
        zero |= {
            "stage3_max_live_parameters": 7_000_000,
            "stage3_max_reuse_distance": 3_200_000,
            "stage3_prefetch_bucket_size": 3_200_000,
            "stage3_param_persistence_threshold": 10_000,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        "zero_optimization": zero,
    }
