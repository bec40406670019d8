"""Gives masters to parameters that were frozen when the model was sharded: they are to be trained, as in gradual
unfreezing, or to follow others, as a mean teacher does.

Frozen parameters have no master, no gradient and no optimizer state. Their flat buffer gets them as a whole: what it
holds stays where it is, so nothing travels. Parameters of the buffer that stay frozen are then like those that were
frozen after sharding. Everything that was made for the trained parameters of the model is told of the new ones, which
come last in their units, so that numbers of others stay what they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.memory import allocate
from thinwire.errors import MismatchError, UsageError
from thinwire.sharding.grads.unit_gradient import Accumulator, ReductionConfig, UnitGradient, fragments_of
from thinwire.sharding.hooks.module_hooks import hook_gradients
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.params.arenas import has_own_masters, share_out
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.runtime.runtime import Runtime
from thinwire.sharding.step.sharded_model import ShardedModel

log = logging.getLogger("thinwire")

_NAMES: Final[Typed[list[str]]] = Typed(list[str])


def unfreeze(runtime: Runtime, names: Set[str]) -> None:
    """Give frozen parameters with these names masters and gradients, because they are to be trained; others of their
    buffers get them as well. Collective.

    Raises:
        UsageError: The model is inside a pass, or its plan or the parameters do not allow it.
        MismatchError: Ranks unfreeze different parameters.
    """
    chosen, name = _buffers_of(runtime, names), min(names)
    frozen = f"{name} was frozen when the model was sharded, and"
    _refuse_inside(runtime, f"{frozen} is to be trained", "set requires_grad = True")
    runtime.refuse(f"requires_grad = True for {name}, which was frozen when the model was sharded,")
    why = _obstacle(runtime, chosen)
    if why:
        raise UsageError(
            f"{frozen} cannot be trained now, as the model has {why}: set "
            "requires_grad = True before thinwire.shard, and freeze it again afterwards if its training is to begin "
            "later"
        )
    _grow(runtime, names, chosen)


def widen(runtime: Runtime, names: Set[str]) -> None:
    """Give frozen parameters with these names masters, because they are to be updated in place, or a checkpoint has
    some; the first rank warns where they cannot have any, and are narrow (see
    :class:`~thinwire.sharding.params.flat_buffer.FlatBuffer`). Collective.

    Raises:
        UsageError: The model is inside a pass.
        MismatchError: Ranks update different parameters.
    """
    chosen, name = _buffers_of(runtime, names), min(names)
    _refuse_inside(runtime, f"{name} was frozen when the model was sharded, and is updated in place", "update it")
    runtime.refuse(f"an update of {name}")
    why = _obstacle(runtime, chosen)
    if not why:
        _grow(runtime, names, chosen)
        return
    narrow = [buffer.layout for _, buffer in chosen if buffer.narrows]
    if not narrow:
        return
    if runtime.sharded.rank == 0:
        log.warning(
            "%s was frozen when the model was sharded, and is updated in place now. It stays in %s, which loses small "
            "changes, as the model has %s: freeze it after thinwire.shard",
            min(names & narrow[0].slot_by_name.keys()),
            narrow[0].dtype,
            why,
        )
    for unit in runtime.units:
        for buffer in unit.buffers:
            buffer.narrows = False


def _refuse_inside(runtime: Runtime, what: str, remedy: str) -> None:
    if runtime.is_inside:
        raise UsageError(f"{what} inside a forward, a backward or full_parameters(): {remedy} outside of them")


def _buffers_of(runtime: Runtime, names: Set[str]) -> list[tuple[Unit, FlatBuffer]]:
    """The flat buffers that hold parameters with these names."""
    return [
        (unit, buffer)
        for unit in runtime.units
        for buffer in unit.buffers
        if not names.isdisjoint(buffer.layout.slot_by_name)
    ]


def _obstacle(runtime: Runtime, chosen: Sequence[tuple[Unit, FlatBuffer]]) -> str:
    """What keeps frozen parameters from getting masters; empty if nothing does."""
    if not runtime.plan.residence.on_device:
        return f"residence {runtime.plan.residence}, whose states and gradients have their places on the host"
    if runtime.exchanges is not None:
        return "islands, which have dealt out what they exchange"
    if runtime.means is not None:
        return "an average of its weights, which was made without it"
    if any(buffer.stored is not None for _, buffer in chosen):
        return "frozen.storage, which keeps it encoded"
    return ""


def _grow(runtime: Runtime, names: Set[str], chosen: Sequence[tuple[Unit, FlatBuffer]]) -> None:
    """Give buffers masters and gradients, and tell everything that was made for the others."""
    sharded = runtime.sharded
    ranks = runtime.data_ranks
    everyone = ranks.all_gather_typed(sorted(names), _NAMES)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise MismatchError(
                f"rank {rank} and rank 0 unfreeze different parameters: {theirs} against {everyone[0]}. Set "
                "requires_grad, and update frozen parameters, alike on every rank"
            )
    runtime.reach_pause()
    grown = [(unit, buffer, _train(buffer, unit, sharded)) for unit, buffer in chosen]
    units = {unit.index: unit for unit, _ in chosen}
    for unit in units.values():
        _lay_out(unit, [buffer for owner, buffer in chosen if owner is unit], sharded)
    owned = [one for _, buffer, part in grown for one in fragments_of(buffer, part, sharded.shard, sharded.share)]
    sharded.fragments.extend(owned)
    sharded.fragments.sort(key=lambda one: (one.unit, one.slot))
    gradients = sorted(sharded.gradients.items())
    sharded.gradients.clear()
    sharded.gradients.update(gradients)
    runtime.units_grew()
    hooks = [hook_gradients(unit, sharded, runtime.passes) for unit in units.values()]
    runtime.undo = [*runtime.undo, *hooks]
    parameters, optimizer = runtime.parameters, runtime.optimizer
    assert parameters is not None
    parameters.train(grown, owned)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.expect([part for _, _, part in grown], owned)


def _train(buffer: FlatBuffer, unit: Unit, sharded: ShardedModel) -> UnitGradient:
    """Give a buffer masters and a gradient."""
    plan, device, share = sharded.plan, sharded.device, sharded.share
    (shares,) = share_out([buffer.layout], plan, sharded.position)
    buffer.train(shares, share, apart=has_own_masters(buffer.layout, plan))
    dtype: torch.dtype = getattr(torch, plan.accumulate_dtype)
    memory = torch.zeros(sum(run.length for run in shares[share]), dtype=dtype, device=device)
    sharded.arenas.append(memory)
    parts = sharded.gradients.setdefault(unit.index, [])
    numel = buffer.layout.shard_numel
    part = UnitGradient(
        unit.index,
        unit.name,
        sum(len(part.layout.slots) for part in parts),
        buffer.layout,
        shares,
        Accumulator(memory),
        lambda: Accumulator(allocate(numel, dtype, device)),
        ReductionConfig(plan),
    )
    parts.append(part)
    return part


def _lay_out(unit: Unit, grown: list[FlatBuffer], sharded: ShardedModel) -> None:
    """Put the buffers that are trained now behind the others of their unit."""
    unit.free()  # after a forward that failed, or between micro-batches, it may be gathered
    order = [*(buffer for buffer in unit.buffers if buffer not in grown), *grown]
    infos = {id(buffer): info for buffer, info in zip(unit.buffers, unit.info.buffers, strict=True)}
    for buffer in grown:
        sizes = tuple(sum(run.length for run in share) for share in buffer.shares)
        infos[id(buffer)] = replace(infos[id(buffer)], trainable=True, shares=sizes)
    parameters = sum(len(part.layout.slots) for part in sharded.gradients[unit.index])
    info = replace(unit.info, buffers=tuple(infos[id(buffer)] for buffer in order), parameters=parameters)
    unit.lay_out(info, order)
