"""Modules that a framework lets its users build in a context of its strategy: no rank holds one of them whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.integrations.common.automatic import AutoPlan, plan_for
from thinwire.integrations.common.mixed import COMPUTE_DTYPES
from thinwire.integrations.common.optimizers import is_sharded
from thinwire.sharding.memory.recorded import RecordedValues, Recording, initialize_meta_modules
from thinwire.sharding.modules.quantized import is_wrapper
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.spec import Factor, Plan


class Building:
    """Builds modules of a strategy of Lightning without memory for their parameters, and shards them by a plan."""

    def __init__(self, strategy: Any, plan: Plan | AutoPlan | str | Path) -> None:
        self._strategy, self._plan, self._recording = strategy, plan, Recording()

    @contextmanager
    def context(self) -> Iterator[None]:
        """Build modules inside. They get the values that they would get on the first rank's CPU."""
        with torch.device("cpu"), self._first_ranks_numbers(), self._recording:
            yield

    def shard(self, module: nn.Module, precision: str, **loop: Any) -> None:
        """Shard a module, unless it is sharded already: one that was built in the context, on the meta device, or as
        usual. Collective.

        Args:
            module: The module.
            precision: One of :data:`~thinwire.integrations.common.mixed.COMPUTE_DTYPES`.
            **loop: What :func:`~thinwire.integrations.common.automatic.plan_for` asks of the loop.

        Raises:
            UsageError: The module is sharded, and has got further parameters since.
        """
        if is_sharded(module):
            listed = [(name, item) for name, item in module.named_parameters() if not is_wrapper(item)]
            new = [name for name, item in listed if not isinstance(item, ShardedParameter)]
            if new:
                raise UsageError(
                    f"parameter {new[0]} is new in {type(module).__name__}, which is sharded: build layers once, and "
                    "return from configure_model early if they exist"
                )
            return
        strategy, device = self._strategy, self._strategy.root_device
        on_meta = any(parameter.is_meta for parameter in module.parameters())
        if on_meta:
            with self._first_ranks_numbers():
                initialize_meta_modules(module, self._recording)
            with torch.no_grad():  # small parameters have values, and so have those built outside of the context
                for parameter in module.parameters():
                    if not parameter.is_meta:
                        parameter.copy_(strategy.broadcast(parameter.detach()))
        else:
            module.to(device)
        mesh = Factor(local=strategy.world_size // strategy.num_nodes, nodes=strategy.num_nodes)
        plan = plan_for(module, self._plan, mesh, COMPUTE_DTYPES[precision], device, **loop)
        if not on_meta:
            tw.shard(module, plan)
            return
        tw.shard(module, plan, values=RecordedValues(module, self._recording), device=device)
        self._recording = Recording()

    @contextmanager
    def _first_ranks_numbers(self) -> Iterator[None]:
        """Draw the random numbers of the first rank, if ranks would draw different ones."""
        own = torch.get_rng_state()
        first = self._strategy.broadcast(own)
        differs = not torch.equal(own, first)
        if differs:
            torch.set_rng_state(first)
        try:
            yield
        finally:
            if differs:
                torch.set_rng_state(own)
