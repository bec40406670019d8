"""When islands exchange which units, and the operations of such an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.program.draft import Draft
from thinwire.program.mesh import Axis, Kind
from thinwire.program.shares import padded
from thinwire.program.step import Call, Event, Lane, Operation, Phase, UnitInfo
from thinwire.program.wire import change_sizes
from thinwire.spec import Plan

ALIGNED = 4
"""Elements of fp32 in 16 bytes: pieces of an exchange begin at multiples of it."""


class ExchangePart(NamedTuple):
    """The part of a fragment that travels as one vector.

    Attributes:
        units: Units of the fragment with elements in it.
        encoded: Whether the plan's codec applies to it.
        numel: Number of elements of this rank's shares.
        length: Number of elements with padding: ranks that own the same shares cut it among them, and so do islands.
    """

    units: tuple[int, ...]
    encoded: bool
    numel: int
    length: int


def due_fragments(plan: Plan, step: int, share: float = 0.0) -> tuple[int, ...]:
    """Fragments whose exchange starts after a step, as a number of updates with its own, before which ``share`` of
    training was done. They take turns within ``every`` steps, the last at its end."""
    islands = plan.islands
    if islands is None or (islands.count == 1 and not islands.elastic):
        return ()
    every, number = islands.every_at(share), islands.fragments
    moment = (step - 1) % every + 1
    return tuple(fragment for fragment in range(number) if (fragment + 1) * every // number == moment)


def next_exchange(plan: Plan, step: int, share: float) -> tuple[int, tuple[int, ...]]:
    """Step and fragments of the first exchange of elastic islands after this step or a later one.

    Args:
        plan: A plan with elastic islands, or with several.
        step: The step, as a number of updates with its own.
        share: Share of training that was done before it. It is taken to grow evenly: ``every`` may change until then.
    """
    later = step
    while not (due := due_fragments(plan, later, share * ((later - 1) / (step - 1) if step > 1 else 1.0))):
        later += 1
    return later, due


def exchanged_units(plan: Plan, units: Sequence[UnitInfo], fragment: int) -> tuple[int, ...]:
    """Units of a fragment: the trained units are dealt out to the fragments in turns.

    Raises:
        SpecError: The model has fewer trained units than the plan has fragments.
    """
    trained = [number for number, unit in enumerate(units) if unit.trainable]
    fragments = 1 if plan.islands is None else plan.islands.fragments
    if fragments > max(1, len(trained)):
        raise plan.unsuitable(
            f"islands.fragments = {fragments}: the model has {len(trained)} trained units to deal out; set it to "
            f"at most {len(trained)}"
        )
    return tuple(trained[fragment::fragments])


def exchange_parts(plan: Plan, units: Sequence[UnitInfo], fragment: int, share: int = 0) -> tuple[ExchangePart, ...]:
    """The vectors of a fragment: the shares that a rank, by its index on the shard axis, owns of its units, those with
    a codec and the others."""
    parts = []
    replicas = plan.world // plan.optimizer.ranks
    for encoded in (True, False):
        numels = {
            unit: sum(b.shares[share] for b in units[unit].buffers if b.trainable and b.encoded is encoded)
            for unit in exchanged_units(plan, units, fragment)
            if any(b.trainable and b.encoded is encoded for b in units[unit].buffers)
        }
        if numels:
            total = sum(numels.values())
            length = padded(max(total, 1), ALIGNED * plan.num_islands * replicas)
            parts.append(ExchangePart(tuple(numels), encoded, total, length))
    return tuple(parts)


def add_exchange(plan: Plan, units: Sequence[UnitInfo], draft: Draft, fragments: Sequence[int]) -> None:
    """Add the exchanges of fragments to a program, at the end of its step.

    Where several ranks of an island own the same shares, each exchanges a part of them with the other islands, and
    gathers the new values of the other parts inside the island.
    """
    event = Event(Phase.STEP, -1, 0)
    delay = 0 if plan.islands is None else plan.islands.delay
    replicas = draft.extent(Axis.REPLICA)
    for fragment in fragments:
        for part in exchange_parts(plan, units, fragment, draft.places[Axis.SHARD]):
            sizes = change_sizes(plan, encoded=part.encoded)
            length, kind = part.length // replicas, Kind.ALL_REDUCE
            if part.encoded and plan.islands is not None and plan.islands.sends_visible:
                length, kind = plan.num_islands * length, Kind.ALL_GATHER  # every island's message goes to all others
            call = Call(kind, Lane.OUTER, Axis.ISLANDS, part.units, part.encoded, delay=delay)
            draft.wait(event, draft.add(call, [(length, sizes)], event))
            if replicas > 1:
                plain = change_sizes(plan, encoded=False)
                call = Call(Kind.ALL_GATHER, Lane.OUTER, Axis.REPLICA, part.units, delay=delay)
                draft.wait(event, draft.add(call, [(part.length, plain)], event, (len(draft.operations) - 1,)))


def exchange_operations(
    plan: Plan, units: Sequence[UnitInfo], fragment: int, position: int = 0
) -> tuple[Operation, ...]:
    """The operations of the exchange of a fragment by themselves."""
    draft = Draft(plan, position)
    add_exchange(plan, units, draft, (fragment,))
    return tuple(draft.operations)
