"""Builds a runtime from a module and a plan: layout, memory, groups, initial values, hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from thinwire.collectives import group as groups
from thinwire.collectives.group import Meter
from thinwire.collectives.links.nccl import backend_maker
from thinwire.collectives.topology import AxisGroup, DataRanks
from thinwire.errors import ThinwireError, UsageError
from thinwire.garbage import uncollected
from thinwire.program import Axis, BufferInfo, Lane, UnitInfo, axis_index, check_live, exchanged_units
from thinwire.sharding.checkpointing.full_state import gather_for_torch
from thinwire.sharding.checkpointing.streaming import stream_saves
from thinwire.sharding.checks import (
    check_agreement,
    check_host_memory,
    check_input_gradients,
    check_modules,
    check_parameters,
    check_patterns,
    check_supported,
    is_lone_linear,
    place_on,
    refuse_shared_memory,
)
from thinwire.sharding.grads.host_memory import HostAccumulator
from thinwire.sharding.grads.unit_gradient import Accumulator, ReductionConfig, UnitGradient
from thinwire.sharding.hooks import module_hooks as hooks
from thinwire.sharding.lanes.lanes import Lanes, Load
from thinwire.sharding.memory.initial import InitialValues, give_back_freed_memory, keep_freed_memory
from thinwire.sharding.memory.local import LocalPart, slice_of
from thinwire.sharding.modules.discover import Selection, UnitModules, discover
from thinwire.sharding.modules.quantized import packed_scales
from thinwire.sharding.modules.recompute import recompute_activations
from thinwire.sharding.optimizer.stock_optimizers import watch_optimizers
from thinwire.sharding.params.arenas import Arenas, Flat, InitialShards, draw
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.gathering import GatherLink
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.params.plan_codecs import PlanCodecs, agreed_codecs
from thinwire.sharding.params.seeds import Seeds, StepCounter
from thinwire.sharding.runtime.runtime import RUNTIME, Runtime
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.unfreezing import unfreeze, widen
from thinwire.spec import Plan
from thinwire.startup import warn_of_late_start

_GROUPS = (
    (Axis.PARAMS, Lane.GATHER),
    (Axis.SECONDARY, Lane.GATHER),
    (Axis.PARAMS, Lane.REDUCE),
    (Axis.SHARD, Lane.REDUCE),
    (Axis.REPLICA, Lane.SYNC),
    (Axis.SHARD, Lane.SPREAD),
    (Axis.WORLD, Lane.CONTROL),
)


def _outer_groups(plan: Plan) -> list[tuple[Axis, Lane]]:
    """Groups for exchanges with other islands, of which ranks that own the same shares each make a part."""
    if plan.num_islands == 1 and not plan.is_elastic:
        return []
    replicas = [] if plan.optimizer == plan.mesh else [(Axis.REPLICA, Lane.OUTER)]
    return [*([] if plan.is_elastic else [(Axis.ISLANDS, Lane.OUTER)]), *replicas]


@uncollected()
@torch.inference_mode(False)  # its tensors are there to be trained
def build(
    model: nn.Module,
    plan: Plan,
    selection: Selection,
    *,
    sync_initial: bool,
    codec_backend: str | None = None,
    part: LocalPart | None = None,
    values: InitialValues | None = None,
    device: torch.device | None = None,
    members: tuple[int, ...] | None = None,
) -> Runtime:
    """Shard a model in place; see :func:`thinwire.sharding.api.shard`. ``part`` is the part of a larger model, by
    default all of it, and ``members`` are global ranks in the order of the plan's mesh, by default all ranks of the
    job."""
    is_whole = part is None
    if part is None:
        own = groups.control(members)
        ranks = own.ranks if members is None else members  # in ascending order, or in the caller's
        part = LocalPart(DataRanks.of(plan, ranks, ranks.index(own.ranks[own.rank])), members=members)
    control, everyone = groups.control(part.data.ranks), groups.control(part.data.everyone)
    modules = _agreed_modules(model, plan, selection, part, whole=is_whole, values=values, device=device)
    device = next((p.device for unit in modules for _, p in unit.parameters), device or torch.device("cpu"))
    if device.type == "cpu":
        give_back_freed_memory()
    codecs = PlanCodecs.of(plan, device, codec_backend)  # may raise, so it comes before memory is allocated
    if plan.placement is not None:
        part = replace(part, data=part.data.placed(plan.placement))
    position = part.data.ranks.index(control.ranks[control.rank])
    meter, lanes = Meter(), Lanes(device, stages=plan.overlap.stages)
    # Threads may still send what others wait for once a model is dropped, so their lanes stay until then.
    groups.before_shutdown(lanes.close if lanes.home.exists else partial(lanes.close))
    if lanes.home.exists and part.control.rank == 0:
        warn_of_late_start()
    codecs.warm_up(plan, device)
    axes = {
        (axis, lane): AxisGroup.of(
            plan,
            axis,
            lane,
            position + part.data.island * plan.world if axis is Axis.ISLANDS else position,
            None if lane is Lane.CONTROL else device,
            meter,
            data=part.data,
        )
        for axis, lane in (*_GROUPS, *_outer_groups(plan))
        if axis is not Axis.SECONDARY or plan.secondary is not None
    }
    decides = is_whole and lanes.home.exists and backend_maker(device) is not None
    slices = {name: slice_of(name, p) for unit in modules for name, p in unit.parameters}
    flats = draw(modules, plan, position)
    first = everyone if sync_initial else None
    initial_of = InitialShards(flats, part, first, values, slices, axis_index(plan, Axis.PARAMS, position))
    arenas = Arenas(flats, plan, axes, device, lanes.host_memory, codecs.stored)
    buffers, gradients = _place(flats, [unit.name for unit in modules], plan, arenas, initial_of, lanes)
    initial_of.agree(everyone)
    if device.type == "cpu":
        keep_freed_memory()
    if sync_initial:
        for value in (*model.buffers(), *(scale for _, scale in packed_scales(model))):
            everyone.broadcast(value)
    steps = StepCounter()
    sharded = ShardedModel(
        model=model,
        plan=plan,
        part=part,
        is_whole_model=is_whole,
        rank=control.rank,
        position=position,
        units=(),
        gradients=gradients,
        arenas=[arenas.gradients],
        device=device,
        slices=slices,
        lanes=lanes,
        axes=axes,
        world=AxisGroup.of(plan, Axis.WORLD, Lane.CONTROL, position, device, meter, data=part.data)
        if decides
        else None,
        meter=meter,
        codecs=codecs,
        steps=steps,
        seeds=Seeds(plan, position, steps, part.data.island),
    )
    return _install(replace(sharded, units=_units(sharded, modules, flats, buffers)), modules)


def _agreed_modules(
    model: nn.Module,
    plan: Plan,
    selection: Selection,
    part: LocalPart,
    *,
    whole: bool,
    values: InitialValues | None,
    device: torch.device | None,
) -> list[UnitModules]:
    """Check the plan and the model, find the units, and compare them with the other ranks'. Collective."""
    everyone = groups.control(part.data.everyone)
    problem: ThinwireError | None = None
    modules: list[UnitModules] = []
    source = ""
    versions: tuple[str, ...] = ()
    try:
        whose = "the job" if part.members is None else "mesh= or group="
        check_supported(plan, everyone.size, whole=whole, whose=whose)
        versions = agreed_codecs(plan)
        if values is not None:
            source = place_on(device, model, values)
        check_parameters(model, cut=part.tensor_ranks > 1)
        if values is None:
            refuse_shared_memory(model)
        check_modules(model, plan)
        modules = discover(model, selection, plan.granularity, lambda name: plan.override(name).granularity)
        check_patterns(plan, modules)
        check_input_gradients(plan, model, modules)
        infos = unit_infos(modules, plan, 0)
        check_live(plan, infos)
        exchanged_units(plan, infos, 0)
        check_host_memory(plan, infos)
    except ThinwireError as error:
        problem = error  # raised after the exchange, which the other ranks are waiting for
    check_agreement(plan, model, modules, source, versions, problem, everyone)
    return modules


def _place(
    flats: Sequence[Flat],
    names: Sequence[str],
    plan: Plan,
    arenas: Arenas,
    initial_of: InitialShards,
    lanes: Lanes,
) -> tuple[dict[int, list[FlatBuffer]], dict[int, list[UnitGradient]]]:
    """Carve flat buffers and gradients from the arenas and fill the buffers with initial values.

    Returns:
        Flat buffers and gradients of trainable buffers, by unit.
    """
    buffers: dict[int, list[FlatBuffer]] = {number: [] for number in range(len(names))}
    gradients: dict[int, list[UnitGradient]] = {}
    topology = ReductionConfig(plan)
    for flat in flats:
        buffer = arenas.carve(flat, initial_of(flat))
        # Re-point parameters buffer by buffer, so that their old memory is freed while the arenas fill.
        buffer.show(whole=not buffer.gathered)
        buffer.release()
        buffers[flat.unit].append(buffer)
        if flat.layout.trainable:
            of_unit = gradients.setdefault(flat.unit, [])
            first_slot = sum(len(part.layout.slots) for part in of_unit)
            name = names[flat.unit] or "(root)"
            owned, local = _accumulators(flat, name, plan, arenas, lanes)
            of_unit.append(UnitGradient(flat.unit, name, first_slot, flat.layout, flat.shares, owned, local, topology))
    return buffers, gradients


def _accumulators(
    flat: Flat, name: str, plan: Plan, arenas: Arenas, lanes: Lanes
) -> tuple[Accumulator, Callable[[], Accumulator]]:
    """A buffer for the gradient of this rank's share, and what makes one for that of its P shard."""
    place: Callable[[torch.Tensor], Accumulator] = Accumulator
    if plan.residence.streams_gradients:
        load = Load(f"gradients {name}", Axis.SHARD, (flat.unit,))
        place = partial(HostAccumulator, device=arenas.device, lanes=lanes, load=load)
    return place(arenas.carve_gradient(flat)), lambda: place(arenas.carve_local_gradient(flat))


def _units(
    sharded: ShardedModel,
    modules: Sequence[UnitModules],
    flats: Sequence[Flat],
    buffers: Mapping[int, Sequence[FlatBuffer]],
) -> tuple[Unit, ...]:
    link = GatherLink(
        sharded.lanes,
        sharded.axes[Axis.PARAMS, Lane.GATHER],
        sharded.axes.get((Axis.SECONDARY, Lane.GATHER)),
        sharded.codecs.gather,
        sharded.seeds,
        sharded.codecs.stored,
        sharded.plan.gather_bytes,
        from_host=sharded.plan.residence.streams_params,
    )
    infos = _infos(modules, sharded.plan, flats)
    return tuple(Unit(number, unit.module, infos[number], buffers[number], link) for number, unit in enumerate(modules))


def _install(sharded: ShardedModel, modules: Sequence[UnitModules]) -> Runtime:
    """Attach a runtime to the model and hook its modules."""
    runtime = Runtime(sharded)
    object.__setattr__(sharded.model, RUNTIME, runtime)
    if (masters := runtime.masters) is not None:
        masters.unfreeze, masters.widen = partial(unfreeze, runtime), partial(widen, runtime)
    undo = hooks.install(runtime)
    if runtime.shares is not None:
        undo += stream_saves(sharded.model)
    watch_optimizers()
    gather_for_torch()
    if sharded.plan.recompute and not sharded.part.is_inner:
        undo += recompute_activations(sharded.model, _recomputed(sharded.model, modules))
    runtime.undo = undo
    return runtime


def unit_infos(modules: Sequence[UnitModules], plan: Plan, rank: int) -> tuple[UnitInfo, ...]:
    """Describe a model's units under a plan for the program, without allocating memory; ``rank`` is the position in the
    mesh of the rank with the shares to count."""
    return _infos(modules, plan, draw(modules, plan, rank))


def _infos(modules: Sequence[UnitModules], plan: Plan, flats: Sequence[Flat]) -> tuple[UnitInfo, ...]:
    of_units = [[flat for flat in flats if flat.unit == number] for number in range(len(modules))]
    return tuple(_info(unit, plan, of_unit) for unit, of_unit in zip(modules, of_units, strict=True))


def _info(unit: UnitModules, plan: Plan, flats: Sequence[Flat]) -> UnitInfo:
    return UnitInfo(
        name=unit.name,
        buffers=tuple(
            BufferInfo(
                numel=flat.layout.numel,
                itemsize=flat.layout.dtype.itemsize,
                trainable=flat.layout.trainable,
                shares=tuple(sum(run.length for run in share) for share in flat.shares),
                encoded=flat.layout.encoded,
                stored=flat.layout.stored,
            )
            for flat in flats
        ),
        parameters=sum(len(flat.layout.slots) for flat in flats if flat.layout.trainable),
        block=unit.block,
        keeps_gathered=plan.override(unit.name).keep_gathered,
        weight_first=plan.overlap.input_gradient and is_lone_linear(unit),
    )


def _recomputed(model: nn.Module, modules: Sequence[UnitModules]) -> list[nn.Module]:
    """The blocks whose activations are recomputed: whole elements of module lists, even if units are smaller."""
    named = dict(model.named_modules())
    blocks = {unit.list_element: named[unit.list_element] for unit in modules if unit.list_element}
    if not blocks:
        raise UsageError(
            "recompute = true, but the model has no block (an element of a ModuleList or Sequential, or a module given "
            "in units=) to recompute; set recompute = false"
        )
    return list(blocks.values())
