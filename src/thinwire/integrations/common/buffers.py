"""Buffers that forwards change from each rank's data: running statistics, codebooks, averages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from thinwire.collectives import group


class SharedBuffers:
    """The buffers of models, of which all ranks take the first one's values, as DDP does before forwards.

    The first call sends all of them. Later ones send those of state dicts, and others in which ranks were different at
    the first call: nothing is sent of tables that no forward changes, such as those of rotary embeddings and masks.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._places = [(module, name) for module in modules for name in module._buffers]
        self._chosen = False

    def share(self) -> None:
        """Take the first rank's values, in one broadcast. Collective, if there are any buffers.

        Call it after steps, which all ranks make: a rank may evaluate alone.
        """
        held = {place: value for place in self._places if (value := place[0]._buffers.get(place[1])) is not None}
        if not held:
            return
        different = group.control().broadcast_together(list(held.values()))
        if not self._chosen:
            on_any = zip(held, group.control().all_reduce_mean(different), strict=True)
            equal = {place for place, share in on_any if not share and place[1] in place[0]._non_persistent_buffers_set}
            self._places = [place for place in self._places if place not in equal]
            self._chosen = True
