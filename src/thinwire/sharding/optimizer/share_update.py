"""The update of a rank's share of the masters: at once, unit by unit as gradients arrive, or in batches of units where
something of the update lives on the host.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence, Set
from typing import final

from thinwire.sharding.grads.host_states import HostStates
from thinwire.sharding.grads.host_updates import HostUpdates
from thinwire.sharding.grads.optimizer_state import InnerOptimizer
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.grads.unit_gradient import OwnedFragment
from thinwire.sharding.lanes.lanes import Ticket
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.sharding.step.schedule import Programs
from thinwire.sharding.step.step_check import UsedGradients


class ShareUpdate:
    """The update of this rank's share, unit by unit where that is faster, and as the programs of the model say.

    Attributes:
        by_unit: Whether units can be updated one by one; see
            :class:`~thinwire.sharding.optimizer.sharded_optimizer.ShardedOptimizer`.
        copies: Whether the optimizer gets gradients as copies in fp32, because they accumulate in another dtype. Copies
            take memory for as many units as are updated at once.
        fragments_of: This rank's fragments, by unit.
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
        self.owned = owned
        self.reducer, self.spreads, self._programs, self.used = reducer, spreads, programs, used
        self.by_unit, self.copies = by_unit, copies
        # Others may keep something in themselves, which a copy of their options would miss.
        of_torch = type(owned.optimizer).__module__.startswith("torch.optim.")
        self._may_wait = by_unit and of_torch and programs.plan.overlap.spread
        self.fragments_of: dict[int, list[OwnedFragment]] = {}
        self.take(owned.fragments)

    def take(self, fragments: Iterable[OwnedFragment]) -> None:
        """Update these fragments as well."""
        for fragment in fragments:
            self.fragments_of.setdefault(fragment.unit, []).append(fragment)

    def perform(self, *, arrived: bool, at_once: bool) -> Set[int] | None:
        """Update the share once its gradients have ``arrived``, which all of them may have already, in one call if it
        has to be ``at_once``. Returns the numbers of the units that are still to be spread; ``None`` for all."""
        if at_once or not self.by_unit:
            self._at_once()
        elif arrived:
            self._as_needed()
            return frozenset()
        else:
            self._as_they_arrive()
        return None

    def in_batches(self, host: HostStates | HostUpdates, *, at_once: bool, spreads: bool) -> Set[int] | None:
        """Update the share in batches of units, because something of the update is on the host, or all of it
        ``at_once``; see :meth:`perform`. If it ``spreads``, updated units are spread at once."""
        self.reducer.join()
        batches, may_wait = self._programs.updates, spreads and self._may_wait
        if at_once or not self.by_unit:
            batches, may_wait = [tuple(unit for batch in batches for unit in batch)], False
        together = tuple(self._programs.spreads) if spreads else None
        host.update(batches, _Batches(self, together, may_wait=may_wait))
        return frozenset() if spreads else None

    def forget_gradients(self) -> None:
        """Drop the gradients that the optimizer has read."""
        if self.owned.host is None:  # else it reads them later, and drops them itself
            for owned in self.owned.fragments:
                owned.value.grad = None

    def _as_they_arrive(self) -> None:
        """Update units as soon as their gradients have arrived, while gradients of later units travel."""
        order, began = self._order(), False
        for units in self.reducer.arrivals(order, apart=self.copies):
            if len(units) == len(order):
                self._at_once()
                return
            if not began:
                began = True
                self.forget_gradients()
            self._update_units(units)
        if not self.copies:
            self._give_gradients(self.owned.fragments)  # for whoever looks at the wrapped optimizer's parameters

    def _as_needed(self) -> None:
        """Update the units in the order in which the next forward needs them, and spread those that travel together
        while later ones are updated."""
        self.reducer.join()
        self.forget_gradients()
        trained = self._order()
        for units in self._programs.spreads or ([(u,) for u in trained] if self.copies else [(*trained,)]):
            self._update_units(units)
            self.spreads.start_batch(units)
        if not self.copies:
            self._give_gradients(self.owned.fragments)  # for whoever looks at the wrapped optimizer's parameters

    def _update_units(self, units: Sequence[int]) -> None:
        """Update this rank's share of units whose gradients have arrived, in one call, and write it back."""
        fragments = [owned for unit in units for owned in self.fragments_of.get(unit, ())]
        self._give_gradients(fragments)
        with self.owned.over_fragments() as inner:
            inner.step()
        for owned in fragments:
            owned.value.grad = None
        self._write_back(units)

    def _at_once(self) -> None:
        self.reducer.join()
        self._give_gradients(self.owned.fragments)
        with self.owned.over_fragments() as inner:
            inner.step()
        self._write_back(self._order())

    def _write_back(self, units: Sequence[int]) -> None:
        """Cast the updated masters of units. Parameters without a gradient have kept their values, and graphs that need
        them stay valid."""
        used, of_model = self.used, self.spreads.units
        only = None if used.all_used else {unit: used.among(unit, of_model[unit].trained) for unit in units}
        self.spreads.write_back(units, only=only)

    def _order(self) -> Sequence[int]:
        """Units with trainable parameters, in the order in which their gradients arrive."""
        return [unit for unit in self._programs.update_order if unit in self.reducer.gradients]

    def _give_gradients(self, fragments: Sequence[OwnedFragment]) -> None:
        """Set the gradients that the optimizer reads, in the dtype of the masters.

        As in torch, the optimizer skips a parameter that has no gradient on any rank.
        """
        is_used, all_used, copies = self.used.is_used, self.used.all_used, self.copies
        for owned in fragments:
            grad, value = owned.grad, owned.value
            if not all_used and not is_used(owned.unit, owned.slot):
                value.grad = None
            else:
                value.grad = grad if not copies or grad.dtype is value.dtype else grad.to(value.dtype)


@final
class _Batches:
    """The steps of one update in batches of units; see
    :class:`~thinwire.sharding.grads.host_memory.UpdateSteps`.

    An update that may wait ends later. What may change until then is therefore taken now: which parameters have
    gradients, and the options of the optimizer. Given are the units that travel together; ``None`` if nothing is spread
    now.
    """

    def __init__(self, share: ShareUpdate, together: Sequence[tuple[int, ...]] | None, *, may_wait: bool) -> None:
        self._share, self._together, self.may_wait = share, together, may_wait
        owned, used, fragments = share.owned, share.used, share.fragments_of
        self._optimizer = owned.at_present() if may_wait else None
        self._absent, self._only = frozenset[int](), None
        if not used.all_used:
            everything = itertools.chain.from_iterable(fragments.values())
            self._absent = frozenset(id(one) for one in everything if not used.is_used(one.unit, one.slot))
            self._only = {unit: used.among(unit, share.spreads.units[unit].trained) for unit in share.reducer.gradients}
        # A batch that is under way on a device holds the flag by which its update is skipped.
        self._found_inf = vars(owned.optimizer).get("found_inf")

    def begin(self, units: Sequence[int]) -> None:
        self._share.spreads.invalidate(units, self._only)

    def expect(self, units: Sequence[int], updated: Ticket) -> None:
        self._share.reducer.expect(updated, units)
        for unit in units:
            self._share.spreads.units[unit].expect_update(updated.wait)

    def prepare(self, units: Sequence[int]) -> None:
        self._share.spreads.visit(units)

    def act(self, units: Sequence[int]) -> None:
        fragments = [owned for unit in units for owned in self._share.fragments_of.get(unit, ())]
        for owned in fragments:
            grad, value = owned.shown, owned.value
            value.grad = None if id(owned) in self._absent else grad.to(value.dtype)
        over_fragments = self._share.owned.over_fragments
        with contextlib.nullcontext(self._optimizer) if self._optimizer else over_fragments() as optimizer:
            optimizer.step()
        for owned in fragments:
            owned.value.grad = None

    def write(self, units: Sequence[int]) -> None:
        self._share.spreads.cast(units)

    def then(self, units: Sequence[int], updated: Ticket | None) -> Sequence[Ticket]:
        after = () if updated is None else (updated,)
        for batch in self._together or ():
            if not frozenset(batch).isdisjoint(units):
                self._share.spreads.start_batch(batch, after=after)
        if updated is not None:
            self._share.reducer.expect(updated, units)
            self._share.spreads.expect(updated, units)
        if self._together is not None:
            self._share.spreads.send_home(units, after)
        return [ticket for unit in units for ticket in self._share.spreads.units[unit].spreads]
