"""Updates this rank's share of a model with an optimizer over its fragments."""

from __future__ import annotations

from collections.abc import Sequence, Set

from thinwire.sharding.grads.optimizer_shards import OwnedFragment
from thinwire.sharding.grads.optimizer_state import InnerOptimizer
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.sharding.step.program_tables import Programs
from thinwire.sharding.step.step_check import UsedGradients

__all__ = ["ShareUpdate"]


class ShareUpdate:
    """The update of this rank's share, unit by unit where that is faster.

    Args:
        owned: The optimizer and its fragments.
        reducer: Reducer of the model's gradients.
        spreads: Takes the updated parameters.
        programs: Programs of the model, which say what is updated and spread in which order.
        used: Flags of the parameters that have gradients.
        by_unit: Whether units can be updated one by one; see
            :class:`~thinwire.sharding.optimizer.sharded_optimizer.ShardedOptimizer`.
        copies: Whether the optimizer gets gradients as copies in fp32, because they accumulate in another dtype. Copies
            take memory for as many units as are updated at once.
    """

    def __init__(
        self,
        owned: InnerOptimizer,
        reducer: Reducer,
        spreads: Spreads,
        programs: Programs,
        used: UsedGradients,
        *,
        by_unit: bool,
        copies: bool,
    ) -> None:
        self._inner, self._fragments = owned.optimizer, owned.fragments
        self._reducer, self._spreads, self._programs, self._used = reducer, spreads, programs, used
        self._by_unit, self._copies = by_unit, copies
        self._fragments_of: dict[int, list[OwnedFragment]] = {}
        for fragment in self._fragments:
            self._fragments_of.setdefault(fragment.unit, []).append(fragment)

    def perform(self, *, arrived: bool, at_once: bool) -> Set[int] | None:
        """Update the share once its gradients have arrived.

        Args:
            arrived: Whether all gradients have arrived.
            at_once: Whether everything has to be updated in one call.

        Returns:
            Numbers of the units that are still to be spread; ``None`` for all.
        """
        if at_once or not self._by_unit:
            self._at_once()
        elif arrived:
            self._as_needed()
            return frozenset()
        else:
            self._as_they_arrive()
        return None

    def forget_gradients(self) -> None:
        """Drop the gradients that the optimizer has read."""
        for owned in self._fragments:
            owned.value.grad = None

    def _as_they_arrive(self) -> None:
        """Update units as soon as their gradients have arrived, while gradients of later units travel."""
        order, began = self._order(), False
        for units in self._reducer.arrivals(order, apart=self._copies):
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
        self._reducer.join()
        self.forget_gradients()
        trained = self._order()
        for units in self._programs.spreads() or ([(u,) for u in trained] if self._copies else [(*trained,)]):
            self._update_units(units)
            self._spreads.start_batch(units)
        self._show_gradients()

    def _update_units(self, units: Sequence[int]) -> None:
        """Update this rank's share of units whose gradients have arrived, in one call."""
        fragments = [owned for unit in units for owned in self._fragments_of.get(unit, ())]
        self._give_gradients(fragments)
        self._inner.step()
        for owned in fragments:
            owned.value.grad = None
        self._spreads.write_back(units)

    def _show_gradients(self) -> None:
        """Let the wrapped optimizer's parameters show their gradients after the update."""
        if not self._copies:
            self._give_gradients(self._fragments)

    def _at_once(self) -> None:
        self._reducer.join()
        self._give_gradients(self._fragments)
        self._inner.step()
        self._spreads.write_back(self._order())

    def _order(self) -> Sequence[int]:
        """Units with trainable parameters, in the order in which their gradients arrive."""
        return [unit for unit in self._programs.update_order() if unit in self._reducer.gradients]

    def _give_gradients(self, fragments: Sequence[OwnedFragment]) -> None:
        """Set the gradients that the optimizer reads, in the dtype of the masters.

        As in torch, the optimizer skips a parameter that has no gradient on any rank.
        """
        is_used, all_used, copies = self._used.is_used, self._used.all_used, self._copies
        for owned in fragments:
            grad, value = owned.grad, owned.value
            if not all_used and not is_used(owned.unit, owned.slot):
                value.grad = None
            else:
                value.grad = grad if not copies or grad.dtype is value.dtype else grad.to(value.dtype)
