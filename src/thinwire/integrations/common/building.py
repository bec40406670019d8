"""Modules that a framework lets its users build in a context of its strategy: no rank holds one of them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.integrations.common.optimizers import is_sharded
from thinwire.sharding.memory.recorded import RecordedValues, Recording, initialize_meta_modules
from thinwire.sharding.modules.quantized import is_wrapper
from thinwire.sharding.tensors.parameter import ShardedParameter
from thinwire.spec import Plan


class Building:
    """Builds modules without memory for their parameters, and shards them.

    Args:
        broadcast: Returns the first rank's object on every rank.
    """

    def __init__(self, broadcast: Callable[[Any], Any]) -> None:
        self._broadcast, self._recording = broadcast, Recording()

    @contextmanager
    def context(self) -> Iterator[None]:
        """Build modules inside. They get the values that they would get on the first rank's CPU."""
        with torch.device("cpu"), self._first_ranks_numbers(), self._recording:
            yield

    def shard(self, module: nn.Module, plan: Callable[[], Plan], device: torch.device) -> None:
        """Shard a module, unless it is sharded already: one that was built in the context, on the meta device, or as
        usual. Collective.

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
        if not any(parameter.is_meta for parameter in module.parameters()):
            tw.shard(module.to(device), plan())
            return
        with self._first_ranks_numbers():
            initialize_meta_modules(module, self._recording)
        with torch.no_grad():  # small parameters have values, and so have those that were built outside of the context
            for parameter in module.parameters():
                if not parameter.is_meta:
                    parameter.copy_(self._broadcast(parameter.detach()))
        tw.shard(module, plan(), values=RecordedValues(module, self._recording), device=device)
        self._recording = Recording()

    @contextmanager
    def _first_ranks_numbers(self) -> Iterator[None]:
        """Draw the random numbers of the first rank, if ranks would draw different ones."""
        own = torch.get_rng_state()
        first = self._broadcast(own)
        differs = not torch.equal(own, first)
        if differs:
            torch.set_rng_state(first)
        try:
            yield
        finally:
            if differs:
                torch.set_rng_state(own)
