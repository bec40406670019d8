"""Updates this rank's share of a model with an optimizer over its fragments."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from thinwire.sharding.grads.optimizer_shards import OwnedFragment
from thinwire.sharding.optimizer.clip import multiply_gradients
from thinwire.sharding.runtime.runtime import Runtime

__all__ = ["ShareUpdate"]


class ShareUpdate:
    """The update of this rank's share, which then spreads to the other ranks.

    Args:
        runtime: Runtime of the model.
        inner: Optimizer over ``fragments``.
        fragments: All fragments that this rank updates.
        by_unit: Whether units can be updated one by one; see
            :class:`~thinwire.sharding.optimizer.sharded_optimizer.ShardedOptimizer`.
    """

    def __init__(
        self, runtime: Runtime, inner: torch.optim.Optimizer, fragments: Sequence[OwnedFragment], *, by_unit: bool
    ) -> None:
        self._runtime, self._inner, self._fragments, self._by_unit = runtime, inner, fragments, by_unit
        # Views for fp32; bf16 gradients are copied, which takes memory for as many units as are updated at once.
        self._copies = runtime.plan.accumulate_dtype != "float32"
        self._fragments_of: dict[int, list[OwnedFragment]] = {}
        for owned in fragments:
            self._fragments_of.setdefault(owned.unit, []).append(owned)

    def perform(self) -> None:
        """Update the share once its gradients have arrived, and end the step. Ranks have agreed on it."""
        runtime, inner = self._runtime, self._inner
        multiply_gradients(runtime, 1.0)  # divides by the loss scale, unless clipping has
        runtime.join_spreads()
        began = runtime.lanes.mark() if runtime.lanes.records_timeline else None
        hooked = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        arrived = runtime.step_result.measured  # the norm is that of all gradients
        unspread: Set[int] | None = None  # all
        few_calls = arrived and runtime.lanes.home.exists  # which are faster on a GPU
        exchanges = runtime.exchanges is not None and runtime.exchanges.writes()  # which comes before the spread
        if not self._by_unit or hooked or few_calls or exchanges:
            self._at_once()
        elif arrived:
            self._as_needed()
            unspread = frozenset()
        else:
            self._as_they_arrive()
        runtime.lanes.computed("update", "of all units", began)
        runtime.finish_step(updated=True, only=unspread)

    def forget_gradients(self) -> None:
        """Drop the gradients that the optimizer has read."""
        for owned in self._fragments:
            owned.value.grad = None

    def _as_they_arrive(self) -> None:
        """Update units as soon as their gradients have arrived, while gradients of later units travel."""
        runtime, order, began = self._runtime, self._runtime.update_order(), False
        for units in runtime.reducer.arrivals(order, apart=self._copies):
            if len(units) == len(order):
                self._at_once()
                return
            if not began:
                began = True
                self.forget_gradients()
            self._update_units(units)
        self._show_gradients()

    def _as_needed(self) -> None:
        """Update the units in the order in which the next forward needs them, and spread those that travel together
        while later ones are updated."""
        runtime = self._runtime
        runtime.reducer.join()
        self.forget_gradients()
        trained = runtime.update_order()
        for units in runtime.schedule.programs.spreads() or (
            [(u,) for u in trained] if self._copies else [(*trained,)]
        ):
            self._update_units(units)
            runtime.spreads.start_batch(units)
        self._show_gradients()

    def _update_units(self, units: Sequence[int]) -> None:
        """Update this rank's share of units whose gradients have arrived, in one call."""
        fragments = [owned for unit in units for owned in self._fragments_of.get(unit, ())]
        self._give_gradients(fragments)
        self._inner.step()
        for owned in fragments:
            owned.value.grad = None
        self._runtime.spreads.write_back(units)

    def _show_gradients(self) -> None:
        """Let the wrapped optimizer's parameters show their gradients after the update."""
        if not self._copies:
            self._give_gradients(self._fragments)

    def _at_once(self) -> None:
        self._runtime.reducer.join()
        self._give_gradients(self._fragments)
        self._inner.step()
        self._runtime.spreads.write_back(self._runtime.update_order())

    def _give_gradients(self, fragments: Sequence[OwnedFragment]) -> None:
        """Set the gradients that the optimizer reads, in the dtype of the masters.

        As in torch, the optimizer skips a parameter that has no gradient on any rank.
        """
        used = self._runtime.agreements.used
        is_used, all_used, copies = used.is_used, used.all_used, self._copies
        for owned in fragments:
            grad, value = owned.grad, owned.value
            if not all_used and not is_used(owned.unit, owned.slot):
                value.grad = None
            else:
                value.grad = grad if not copies or grad.dtype is value.dtype else grad.to(value.dtype)
